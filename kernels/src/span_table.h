// The spans of one step as plain numbers: Python's named tuples (tidegate/timeline/timeline.py) are read once, and then
// summed in several ways. That runs after every step of a training, on its cores.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace tidegate {

struct SpanRow {
  int64_t op;
  // Borrowed from the tuples, which the table keeps.
  nanobind::handle kind, lane, content;
  double start, end;
  int64_t nbytes, numel;
};

class SpanTable {
 public:
  explicit SpanTable(nanobind::object spans);

  const std::vector<SpanRow>& rows() const { return rows_; }
  const nanobind::tuple& spans() const { return spans_; }

 private:
  nanobind::tuple spans_;
  std::vector<SpanRow> rows_;
};

void bind_span_table(nanobind::module_& m);

}  // namespace tidegate
