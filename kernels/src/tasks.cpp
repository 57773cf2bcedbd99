#include "tasks.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "clock.h"
#include "short_slice.h"

namespace tidegate {

CopyTask::CopyTask(std::vector<Copy> copies, double bytes_per_second)
    : copies_(std::move(copies)),
      seconds_(std::accumulate(copies_.begin(), copies_.end(), 0.0,
                               [](double sum, const Copy& copy) { return sum + double(copy.nbytes); }) /
               bytes_per_second) {}

TaskResult CopyTask::run(const std::function<void()>&) {
  ask_for_short_slice();
  const double start = monotonic_seconds();
  for (const Copy& copy : copies_) copy_bytes(copy.dst, copy.src, copy.nbytes);
  const double left = start + seconds_ - monotonic_seconds();
  if (left > 0) {
    timespec pause{time_t(left), long(1e9 * (left - std::floor(left)))};
    while (nanosleep(&pause, &pause) != 0) {
    }
  }
  return {start, monotonic_seconds()};
}

TaskResult SquaresTask::run(const std::function<void()>&) {
  const double start = monotonic_seconds();
  std::vector<NormParts> sums;
  for (const Part& part : parts_) sums.push_back(sum_of_squares(pool_, part.elements, part.numel, part.dtype));
  sums_ = std::move(sums);
  return {start, monotonic_seconds()};
}

TaskResult UpdateTask::run(const std::function<void()>&) {
  const double start = monotonic_seconds();
  const std::unique_ptr<BlockChecksums> checksums = flush_ ? flush_->begin_checksums() : nullptr;
  for (const Part& part : parts_) {
    Scalars scalars = part.scalars;
    scalars.grad_scale *= factor_->get();
    if (checksums)
      adamw_update(pool_, part.arrays, part.format, part.dtype, scalars, *checksums);
    else
      adamw_update(pool_, part.arrays, part.format, part.dtype, scalars);
  }
  if (checksums) flush_->set_checksums(checksums->finish());
  return {start, monotonic_seconds()};
}

std::unique_ptr<BlockChecksums> TransferTask::begin_checksums() const {
  clear_padding();
  return std::make_unique<BlockChecksums>(request_.memory, request_.nbytes, request_.block_bytes);
}

void TransferTask::clear_padding() const { std::memset(request_.memory + request_.nbytes - padding_, 0, padding_); }

TaskResult TransferTask::run(const std::function<void()>& queued) {
  ask_for_short_slice();
  const double asked = monotonic_seconds();
  bool ok = false;
  try {
    if (lock_) entered_ = lock_->enter(timeout_seconds_);
    since_ = monotonic_seconds();
    if (request_.kind == IoKind::Write && stop_->is_set()) throw std::runtime_error("the path takes no more state");
    if (request_.kind == IoKind::Write) clear_padding();
    IoRequest request = request_;
    request.checksums_known = !checksums_.empty();
    ticket_ = pool_.submit(request);
    queued();
    ok = ticket_->wait(std::numeric_limits<double>::infinity()) && ticket_->ok();
    // Not before: a path that was closed while this task waited for the lock no longer has memory for them.
    if (ok) std::copy(checksums_.begin(), checksums_.end(), request.checksums);
  } catch (const std::exception&) {  // the same call from Python raises it, too
    if (ticket_) {
      ticket_->cancel();
      ticket_->wait(std::numeric_limits<double>::infinity());
    }
  }
  since_ = std::numeric_limits<double>::quiet_NaN();
  if (entered_ && entered_->acquired) lock_->leave();
  if (!ok) return {asked, monotonic_seconds(), false};
  succeeded_ = true;
  const IoState state = ticket_->state();
  return {state.start, state.end};
}

}  // namespace tidegate
