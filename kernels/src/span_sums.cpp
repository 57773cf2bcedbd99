// Sums over the spans of a step: copies over the link by phase, and the work of each rate. They run after every step of a
// training, on its cores. What they mean is in Python: tidegate/timeline/bytes_by_phase.py, tidegate/speeds/rate_card.py.
#include "span_sums.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "span_table.h"

namespace nb = nanobind;

namespace tidegate {
namespace {

bool same(nb::handle a, nb::handle b) { return a.is(b) || a.equal(b); }

// Copies over the link in each phase of a step.
class LinkTotals {
 public:
  explicit LinkTotals(nb::sequence phases) {
    for (nb::handle phase : phases)
      phases_.push_back({phase.attr("phase"), nb::cast<double>(phase.attr("start")), nb::cast<double>(phase.attr("end"))});
  }

  void add(const SpanRow& span) {
    if (span.content.is_none() || !(same(span.lane, h2d_) || same(span.lane, d2h_))) return;
    const double start = span.start, end = span.end;
    Channel& channel = channel_of(span.lane, span.content);
    const double began = std::max(start, channel.busy_until);
    const double ended = channel.busy_until = std::max(end, began);
    // Nearly every copy lies in the same phase as the one before it.
    if (!is_in(phase_, start, end)) {
      const auto later = std::upper_bound(phases_.begin(), phases_.end(), start,
                                          [](double moment, const Phase& phase) { return moment < phase.start; });
      const size_t found = later == phases_.begin() ? 0 : size_t(later - phases_.begin()) - 1;
      if (start < phases_[found].start || end > phases_[found].end) {
        divide(channel, start, end, span.nbytes);
        divide_seconds(channel, began, ended);
        return;
      }
      phase_ = found;
    }
    Total& total = total_of(channel, phases_[phase_].name);
    total.nbytes += span.nbytes;
    total.seconds += ended - began;
  }

  nb::list result() const {
    nb::list totals;
    for (const Channel& channel : channels_)
      for (const Total& total : channel.totals)
        totals.append(nb::make_tuple(channel.lane, channel.content, total.phase, total.nbytes, total.seconds));
    return totals;
  }

 private:
  struct Phase {
    nb::object name;
    double start, end;
  };
  struct Total {
    nb::object phase;
    int64_t nbytes;
    double seconds;
  };
  struct Channel {
    nb::object lane, content;
    double busy_until;
    std::vector<Total> totals;
  };

  // The share of an interval in each phase, as `split_by_phase` has it. Phases follow each other.
  struct Share {
    nb::object phase;
    double share;
  };
  std::vector<Share> shares(double start, double end) const {
    if (end <= start) {
      for (const Phase& phase : phases_)
        if (phase.start <= start && start <= phase.end) return {{phase.name, 1.0}};
      return {{other_, 1.0}};
    }
    std::vector<Share> found;
    double covered = 0.0;
    const auto add = [&](const nb::object& name, double seconds) {
      for (Share& one : found)
        if (same(one.phase, name)) {
          one.share += seconds;
          return;
        }
      found.push_back({name, seconds});
    };
    for (const Phase& phase : phases_) {
      const double common = std::min(end, phase.end) - std::max(start, phase.start);
      if (common <= 0.0) continue;
      add(phase.name, common);
      covered += common;
    }
    const double uncovered = end - start - covered;
    // Less than a billionth is a rounding error, not a gap between phases.
    if (uncovered > 1e-9 * (end - start)) add(other_, uncovered);
    double sum = 0.0;
    for (const Share& one : found) sum += one.share;
    for (Share& one : found) one.share /= sum;
    return found;
  }

  void divide(Channel& channel, double start, double end, int64_t nbytes) {
    int64_t left = nbytes;
    const std::vector<Share> parts = shares(start, end);
    for (size_t i = 0; i < parts.size(); ++i) {
      // The last phase takes the rounding error.
      const int64_t part = i + 1 == parts.size() ? left : int64_t(std::nearbyint(double(nbytes) * parts[i].share));
      left -= part;
      total_of(channel, parts[i].phase).nbytes += part;
    }
  }

  void divide_seconds(Channel& channel, double start, double end) {
    for (const Share& part : shares(start, end)) total_of(channel, part.phase).seconds += (end - start) * part.share;
  }

  bool is_in(size_t phase, double start, double end) const {
    return phases_[phase].start <= start && start < phases_[phase].end && end <= phases_[phase].end;
  }

  Channel& channel_of(nb::handle lane, nb::handle content) {
    for (Channel& channel : channels_)
      if (same(channel.lane, lane) && same(channel.content, content)) return channel;
    channels_.push_back({nb::borrow(lane), nb::borrow(content), -HUGE_VAL, {}});
    return channels_.back();
  }

  Total& total_of(Channel& channel, const nb::object& phase) {
    for (Total& total : channel.totals)
      if (same(total.phase, phase)) return total;
    channel.totals.push_back({phase, 0, 0.0});
    return channel.totals.back();
  }

  const nb::str h2d_{"h2d"}, d2h_{"d2h"}, other_{"other"};
  std::vector<Phase> phases_;
  std::vector<Channel> channels_;
  size_t phase_ = 0;
};

nb::list link_totals(const SpanTable& spans, nb::sequence phases) {
  if (nb::len(phases) == 0) throw nb::value_error("phases is empty: a step has one phase or more");
  LinkTotals totals(phases);
  for (const SpanRow& span : spans.rows()) totals.add(span);
  return totals.result();
}

// The work of each rate in a step.
class Work {
 public:
  explicit Work(nb::dict rates) : rates_(std::move(rates)) {}

  void add(const SpanRow& span) {
    const Source& source = source_of(span.kind, span.lane);
    Total& total = totals_[source.total];
    total.amount += source.counts_elements ? span.numel : span.nbytes;
    total.seconds += span.end - span.start;
    total.overlaps |= span.start < total.end;
    total.end = span.end;
  }

  nb::tuple result() const {
    nb::dict work;
    nb::list overlapping;
    for (const Total& total : totals_) {
      work[total.name] = nb::make_tuple(total.amount, total.seconds);
      if (total.overlaps) overlapping.append(total.name);
    }
    return nb::make_tuple(work, overlapping);
  }

 private:
  struct Source {
    nb::object kind, lane;
    size_t total;
    bool counts_elements;
  };
  struct Total {
    nb::object name;
    int64_t amount = 0;
    double seconds = 0.0;
    double end = -HUGE_VAL;
    bool overlaps = false;
  };

  const Source& source_of(nb::handle kind, nb::handle lane) {
    for (const Source& source : sources_)
      if (source.kind.is(kind) && source.lane.is(lane)) return source;
    nb::object name = nb::borrow(lane);
    bool counts_elements = false;
    if (rates_.contains(kind)) {
      const nb::tuple rate = nb::cast<nb::tuple>(rates_[kind]);
      name = rate[0];
      counts_elements = nb::cast<bool>(rate[1]);
    }
    const auto found = std::find_if(totals_.begin(), totals_.end(), [&](const Total& one) { return same(one.name, name); });
    const size_t total = size_t(found - totals_.begin());
    if (found == totals_.end()) totals_.push_back({name});
    sources_.push_back({nb::borrow(kind), nb::borrow(lane), total, counts_elements});
    return sources_.back();
  }

  const nb::dict rates_;
  std::vector<Source> sources_;
  std::vector<Total> totals_;
};

nb::tuple measured_work(const SpanTable& spans, nb::dict rates) {
  Work work(std::move(rates));
  for (const SpanRow& span : spans.rows()) work.add(span);
  return work.result();
}

}  // namespace

void bind_span_sums(nb::module_& m) {
  m.def("link_totals", &link_totals);
  m.def("measured_work", &measured_work);
}

}  // namespace tidegate
