// The fields of a span, which Python makes as a named tuple (tidegate/timeline/timeline.py).
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace tidegate {

class SpanFields {
 public:
  // Places of the fields in the tuple.
  static constexpr Py_ssize_t kOp = 0, kKind = 1, kLane = 2, kStart = 4, kEnd = 5, kBytes = 6, kElements = 7, kContent = 8;

  explicit SpanFields(nanobind::handle span) : span_(span.ptr()) {
    if (!PyTuple_Check(span_) || PyTuple_GET_SIZE(span_) <= kContent) throw nanobind::type_error("a span must be a Span");
  }

  nanobind::handle operator[](Py_ssize_t place) const { return PyTuple_GET_ITEM(span_, place); }
  double number(Py_ssize_t place) const { return nanobind::cast<double>((*this)[place]); }
  int64_t count(Py_ssize_t place) const { return nanobind::cast<int64_t>((*this)[place]); }

 private:
  PyObject* const span_;
};

}  // namespace tidegate
