#include "span_table.h"

#include <unordered_map>

namespace nb = nanobind;

namespace tidegate {
namespace {

// Places of the fields in the tuple.
constexpr Py_ssize_t kOp = 0, kKind = 1, kLane = 2, kStart = 4, kEnd = 5, kBytes = 6, kElements = 7, kContent = 8;

SpanRow row_of(nb::handle span) {
  PyObject* const tuple = span.ptr();
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) <= kContent) throw nb::type_error("a span must be a Span");
  const auto field = [&](Py_ssize_t place) { return nb::handle(PyTuple_GET_ITEM(tuple, place)); };
  const auto count = [&](Py_ssize_t place) { return nb::cast<int64_t>(field(place)); };
  const auto seconds = [&](Py_ssize_t place) { return nb::cast<double>(field(place)); };
  try {
    return {count(kOp),   field(kKind),    field(kLane),  field(kContent), seconds(kStart),
            seconds(kEnd), count(kBytes), count(kElements)};
  } catch (const nb::cast_error&) {
    throw nb::type_error("a span must be a Span, with numbers as its class has them");
  }
}

// The bytes of all spans of a kind, without the first `skipped` spans: those of the last run of each op, and those of its
// earlier runs.
nb::tuple bytes_of_kind(const SpanTable& table, nb::handle kind, size_t skipped) {
  std::unordered_map<int64_t, int64_t> last;
  int64_t all = 0, once = 0;
  for (size_t i = skipped; i < table.rows().size(); ++i) {
    const SpanRow& row = table.rows()[i];
    if (!row.kind.is(kind)) continue;
    last[row.op] = row.nbytes;
    all += row.nbytes;
  }
  for (const auto& [op, nbytes] : last) once += nbytes;
  return nb::make_tuple(once, all - once);
}

}  // namespace

SpanTable::SpanTable(nb::object spans) : spans_(nb::steal<nb::tuple>(PySequence_Tuple(spans.ptr()))) {
  if (!spans_.is_valid()) throw nb::python_error();
  rows_.reserve(nb::len(spans_));
  for (nb::handle span : spans_) rows_.push_back(row_of(span));
}

void bind_span_table(nb::module_& m) {
  nb::class_<SpanTable>(m, "SpanTable")
      .def(nb::init<nb::object>())
      .def_prop_ro("spans", [](const SpanTable& table) { return table.spans(); })
      .def("bytes_of_kind", &bytes_of_kind);
}

}  // namespace tidegate
