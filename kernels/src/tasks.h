// Work of ops that needs no interpreter: a lane's thread runs it as soon as the dispatcher lets the op begin.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "block_checksums.h"
#include "direct_io.h"
#include "kernels.h"
#include "path_lock.h"
#include "thread_pool.h"

namespace tidegate {

// What a task did: its span in seconds of the monotonic clock, and whether it succeeded.
struct TaskResult {
  double start;
  double end;
  bool ok = true;
};

// The work of one op. What its addresses point to must live until it has ended.
class Task : public std::enable_shared_from_this<Task> {
 public:
  virtual ~Task() = default;
  // `queued`: to be called when all work of a transfer is queued. Throws nothing.
  virtual TaskResult run(const std::function<void()>& queued) = 0;
};

// Copies in host memory, at most at this speed: those of the emulated device.
class CopyTask : public Task {
 public:
  struct Copy {
    char* dst;
    const char* src;
    size_t nbytes;
  };

  CopyTask(std::vector<Copy> copies, double bytes_per_second);
  TaskResult run(const std::function<void()>& queued) override;

 private:
  const std::vector<Copy> copies_;
  const double seconds_;
};

// Sums of squares of gradients, by the threads of a pool.
class SquaresTask : public Task {
 public:
  struct Part {
    const void* elements;
    size_t numel;
    GradDtype dtype;
  };

  SquaresTask(ThreadPool& pool, std::vector<Part> parts) : pool_(pool), parts_(std::move(parts)) {}
  TaskResult run(const std::function<void()>& queued) override;
  // One sum for each part, in their order; none before the task has ended.
  const std::vector<NormParts>& sums() const { return sums_; }

 private:
  ThreadPool& pool_;
  const std::vector<Part> parts_;
  std::vector<NormParts> sums_;
};

// The factor of a step for all gradients. It is known only when the gradient norm is, after the step's tasks were made.
class GradientFactor : public std::enable_shared_from_this<GradientFactor> {
 public:
  void set(float factor) { factor_ = factor; }
  float get() const { return factor_; }

 private:
  std::atomic<float> factor_{1.0f};
};

class TransferTask;

// Updates of AdamW by the threads of a pool.
class UpdateTask : public Task {
 public:
  struct Part {
    Arrays arrays;
    WeightFormat format;
    GradDtype dtype;
    Scalars scalars;  // with a gradient scale of 1 or -1, which `factor` multiplies
  };

  // `flush`: the write of the updated state that follows, for which the update makes the checksums; null for none.
  UpdateTask(ThreadPool& pool, std::vector<Part> parts, std::shared_ptr<const GradientFactor> factor,
             std::shared_ptr<TransferTask> flush)
      : pool_(pool), parts_(std::move(parts)), factor_(std::move(factor)), flush_(std::move(flush)) {}
  TaskResult run(const std::function<void()>& queued) override;

 private:
  ThreadPool& pool_;
  const std::vector<Part> parts_;
  const std::shared_ptr<const GradientFactor> factor_;
  const std::shared_ptr<TransferTask> flush_;
};

// Says that a path takes no more state. Writes that begin later fail at once.
class WriteStop : public std::enable_shared_from_this<WriteStop> {
 public:
  void set() { set_ = true; }
  bool is_set() const { return set_; }

 private:
  std::atomic<bool> set_{false};
};

// One transfer between memory and a file of a storage path, under the path's lock.
class TransferTask : public Task {
 public:
  // `padding`: bytes at the end of the memory that a write sets to zero first. `lock`: null for none. `timeout_seconds`:
  // longest wait for it, after which the transfer runs without it. `stop`: of a write, when not to begin.
  TransferTask(IoPool& pool, const IoRequest& request, size_t padding, std::shared_ptr<PathLock> lock,
               double timeout_seconds, std::shared_ptr<const WriteStop> stop)
      : pool_(pool),
        request_(request),
        padding_(padding),
        lock_(std::move(lock)),
        timeout_seconds_(timeout_seconds),
        stop_(std::move(stop)) {}
  TaskResult run(const std::function<void()>& queued) override;
  // Checksums for the blocks of the state that this task writes; its padding is zeros from now on.
  std::unique_ptr<BlockChecksums> begin_checksums() const;
  // Gives the next run the checksums of the state, which does not change before the run; empty for none. Without them the
  // run makes them.
  void set_checksums(std::vector<uint32_t> checksums) { checksums_ = std::move(checksums); }
  // Forgets the last run, so that the task may run again. Not while it runs.
  void reset() {
    checksums_.clear();
    succeeded_ = false;
    entered_.reset();
    ticket_.reset();
  }

  bool succeeded() const { return succeeded_; }
  // Since when the transfer is under way; NaN if it is not. May be asked at any time.
  double since() const { return since_; }
  // How it got the lock; nothing before it asked for it, and without a lock.
  std::optional<Entered> entered() const { return entered_; }
  // What the threads of the path did; nothing before the transfer was queued.
  std::optional<IoTicket> ticket() const { return ticket_; }

 private:
  void clear_padding() const;

  IoPool& pool_;
  const IoRequest request_;
  const size_t padding_;
  const std::shared_ptr<PathLock> lock_;
  const double timeout_seconds_;
  const std::shared_ptr<const WriteStop> stop_;
  std::vector<uint32_t> checksums_;
  std::optional<Entered> entered_;
  std::optional<IoTicket> ticket_;
  std::atomic<bool> succeeded_{false};
  std::atomic<double> since_{std::numeric_limits<double>::quiet_NaN()};
};

}  // namespace tidegate
