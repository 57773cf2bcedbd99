// What an update waited for, from its spans: tidegate/timeline/stall_analysis.py, the rules and their reasons, at a tenth of its price.
// It runs after every step of a training, on its cores.
#include "waits.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "span_table.h"

namespace nb = nanobind;

namespace tidegate {
namespace {

struct Span {
  int64_t op;
  int lane;
  bool computes;
  double start, end;
};

// The lanes of a step by number, in the order in which they are met. The last number is that of the cause `dispatch`.
class Lanes {
 public:
  Lanes() : cpu_(nb::str("cpu")), device_(nb::str("device")) {}

  int number_of(nb::handle name) {
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i].is(name)) return static_cast<int>(i);
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i].equal(name)) return static_cast<int>(i);
    names_.push_back(nb::borrow<nb::object>(name));
    computes_.push_back(names_.back().equal(cpu_) || names_.back().equal(device_));
    return static_cast<int>(names_.size()) - 1;
  }

  bool computes(int lane) const { return computes_[static_cast<size_t>(lane)]; }
  size_t count() const { return names_.size(); }
  nb::handle name(size_t lane) const { return names_[lane]; }

 private:
  std::vector<nb::object> names_;
  std::vector<bool> computes_;
  nb::str cpu_, device_;
};

class Waits {
 public:
  Waits(const SpanTable& spans, nb::dict deps, double low, double high) : deps_(deps), low_(low), high_(high) {
    spans_.reserve(spans.rows().size());
    for (const SpanRow& span : spans.rows()) {
      const int lane = lanes_.number_of(span.lane);
      spans_.push_back({span.op, lane, lanes_.computes(lane), span.start, span.end});
    }
  }

  nb::dict by_cause() {
    if (find_gaps()) {
      note_order();
      waited_.assign(lanes_.count() + 1, 0.0);
      for (const Gap& gap : gaps_) blame(gap);
    }
    nb::dict found;
    for (size_t lane = 0; lane < lanes_.count() && lane < waited_.size(); ++lane)
      if (waited_[lane] > 0.0) found[lanes_.name(lane)] = waited_[lane];
    if (!waited_.empty() && waited_.back() > 0.0) found["dispatch"] = waited_.back();
    return found;
  }

 private:
  static constexpr int kNone = -1;

  struct Gap {
    double low, high;
    int ends_with;  // the span that begins where it ends; none for the last gap of the update
  };

  // The time of the update in which nothing computes. Whether there is any.
  bool find_gaps() {
    std::vector<int> compute;
    for (size_t i = 0; i < spans_.size(); ++i)
      if (const Span& s = spans_[i]; s.computes && s.end > s.start && s.end > low_ && s.start < high_)
        compute.push_back(static_cast<int>(i));
    std::sort(compute.begin(), compute.end(), [&](int a, int b) {
      const Span &x = spans_[a], &y = spans_[b];
      if (x.start != y.start) return x.start < y.start;
      return x.op != y.op ? x.op < y.op : a > b;
    });
    double cursor = low_;
    for (int i : compute) {
      if (spans_[i].start > cursor) gaps_.push_back({cursor, spans_[i].start, i});
      cursor = std::max(cursor, spans_[i].end);
    }
    if (cursor < high_) gaps_.push_back({cursor, high_, kNone});
    return !gaps_.empty();
  }

  // For each span the one before it on its lane, and of an op that was repeated the last run. What ended before the
  // update began explains nothing in it.
  void note_order() {
    std::vector<int> order;
    for (size_t i = 0; i < spans_.size(); ++i)
      if (spans_[i].end > low_) order.push_back(static_cast<int>(i));
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      const Span &x = spans_[a], &y = spans_[b];
      if (x.start != y.start) return x.start < y.start;
      if (x.end != y.end) return x.end < y.end;
      return x.op != y.op ? x.op < y.op : a < b;
    });
    longest_chain_ = order.size();
    before_.assign(spans_.size(), kNone);
    std::vector<int> lane_last(lanes_.count(), kNone);
    for (int i : order) {
      last_run_[spans_[i].op] = i;
      before_[i] = std::exchange(lane_last[static_cast<size_t>(spans_[i].lane)], i);
    }
  }

  // What a span waited for: the last to end of its dependencies and its lane's last one.
  int blocker(int span) const {
    int found = before_[span];
    PyObject* deps = PyDict_GetItem(deps_.ptr(), nb::int_(spans_[span].op).ptr());
    if (deps == nullptr) return found;
    for (nb::handle dep : nb::handle(deps)) {
      const auto run = last_run_.find(nb::cast<int64_t>(dep));
      if (run == last_run_.end()) continue;
      const Span& one = spans_[run->second];
      if (found == kNone || one.end > spans_[found].end ||
          (one.end == spans_[found].end && one.op >= spans_[found].op))
        found = run->second;
    }
    return found;
  }

  // The span that ends last of those that began before the update's end.
  int last() const {
    int found = kNone;
    for (size_t i = 0; i < spans_.size(); ++i) {
      const Span& s = spans_[i];
      if (s.start < high_ && (found == kNone || s.end > spans_[found].end ||
                              (s.end == spans_[found].end && s.op > spans_[found].op)))
        found = static_cast<int>(i);
    }
    return found;
  }

  // Cuts a gap along the chain that explains it, from its end to its start.
  void blame(const Gap& gap) {
    double& dispatch = waited_.back();
    double cursor = gap.high;
    int span = gap.ends_with == kNone ? last() : blocker(gap.ends_with);
    // Clocks that disagree can make a chain go in circles: what is beyond so many spans was met before.
    for (size_t left = longest_chain_; span != kNone && cursor > gap.low && left > 0; --left) {
      const Span& s = spans_[span];
      if (s.end < cursor) {
        const double end = std::max(s.end, gap.low);
        dispatch += cursor - end;
        cursor = end;
      }
      if (gap.low < cursor && s.start < cursor) {
        const double start = std::max(s.start, gap.low);
        waited_[static_cast<size_t>(s.lane)] += cursor - start;
        cursor = start;
      }
      span = blocker(span);
    }
    if (gap.low < cursor) dispatch += cursor - gap.low;
  }

  nb::dict deps_;
  double low_, high_;
  Lanes lanes_;
  std::vector<Span> spans_;
  std::vector<Gap> gaps_;
  std::vector<int> before_;
  std::unordered_map<int64_t, int> last_run_;
  size_t longest_chain_ = 0;
  std::vector<double> waited_;
};

nb::dict exposed_waits(const SpanTable& spans, nb::dict deps, double low, double high) {
  return Waits(spans, deps, low, high).by_cause();
}

}  // namespace

void bind_waits(nb::module_& m) { m.def("exposed_waits", &exposed_waits); }

}  // namespace tidegate
