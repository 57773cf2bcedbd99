// The queues of one storage path, one a direction: transfers in order, their blocks taken one by one by whichever thread
// is free.
#include "direct_io.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "clock.h"
#include "computing_cores.h"
#include "move_block.h"
#include "short_slice.h"
#include "signals_blocked.h"

namespace tidegate {
namespace {

constexpr double kLongestWaitSeconds = 1e8;  // what is longer is no limit, and would overflow the clock

void check_aligned(size_t value, const char* name) {
  if (value % kDirectAlignment != 0)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be a multiple of " +
                                std::to_string(kDirectAlignment) + " for a file opened with O_DIRECT");
}

void check(const IoRequest& request, bool direct) {
  if (request.block_bytes == 0) throw std::invalid_argument("block_bytes is 0, must be 1 or more");
  if (request.memory == nullptr && request.nbytes != 0)
    throw std::invalid_argument("address is 0 and nbytes is " + std::to_string(request.nbytes));
  constexpr auto last = uint64_t(std::numeric_limits<off_t>::max());
  if (request.offset < 0 || request.nbytes > last - uint64_t(request.offset))
    throw std::invalid_argument("offset is " + std::to_string(request.offset) + " and nbytes is " +
                                std::to_string(request.nbytes) + ", must lie in 0.." + std::to_string(last));
  if (!direct) return;
  check_aligned(reinterpret_cast<uintptr_t>(request.memory), "address");
  check_aligned(request.nbytes, "nbytes");
  check_aligned(size_t(request.offset), "offset");
  check_aligned(request.block_bytes, "block_bytes");
}

}  // namespace

struct IoTransfer {
  IoTransfer(std::shared_ptr<IoQueue> of, const IoRequest& asked, bool aligned)
      : queue(std::move(of)),
        request(asked),
        direct(aligned),
        num_blocks(asked.nbytes / asked.block_bytes + (asked.nbytes % asked.block_bytes != 0)) {}

  const std::shared_ptr<IoQueue> queue;
  const IoRequest request;
  const bool direct;
  const size_t num_blocks;
  std::condition_variable ended;
  // Guarded by the queue's mutex.
  size_t next = 0;
  size_t running = 0;
  double last_end = 0;
  IoState state;
};

struct IoQueue {
  explicit IoQueue(size_t most) : most_of_direction(most) {}

  const size_t most_of_direction;  // blocks of one direction that may be in flight
  const pid_t owner = getpid();
  std::mutex mutex;  // guards what follows; held for moments only
  std::condition_variable wake;
  struct Direction {
    std::deque<std::shared_ptr<IoTransfer>> waiting;  // those with blocks that nobody has begun
    size_t running = 0;  // blocks
  };
  Direction reads, writes;
  bool read_last = false;  // the direction of the last block that was begun
  bool closed = false;
  std::mutex joining;  // held until the threads are gone; guards what follows
  std::vector<std::thread> workers;

  bool is_owner() const { return getpid() == owner; }

  void check_owner() const {
    if (!is_owner())
      throw std::runtime_error("this IoPool belongs to process " + std::to_string(owner) +
                               ", whose threads a forked child does not have: make another one");
  }

  Direction& of(const IoTransfer& transfer) { return transfer.request.kind == IoKind::Read ? reads : writes; }

  bool may_begin(const Direction& direction) const {
    return !direction.waiting.empty() && direction.running < most_of_direction;
  }

  // The next transfer to work on: of the direction with fewer blocks in flight where both have work, and by turns where
  // they have equally many. So neither waits for the other, and few threads are idle while one of them has work. Null if
  // there is none.
  std::shared_ptr<IoTransfer> next() const {
    if (!may_begin(reads) && !may_begin(writes)) return nullptr;
    if (!may_begin(writes)) return reads.waiting.front();
    if (!may_begin(reads)) return writes.waiting.front();
    const bool read = reads.running == writes.running ? !read_last : reads.running < writes.running;
    return (read ? reads : writes).waiting.front();
  }

  void work() {
    ask_for_short_slice();
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      std::shared_ptr<IoTransfer> transfer;
      wake.wait(lock, [&] { return (transfer = next()) || (closed && reads.waiting.empty() && writes.waiting.empty()); });
      if (!transfer) {
        wake.notify_all();  // those that the limit of a direction has kept waiting while blocks were left
        return;
      }
      const size_t block = begin_block(*transfer);
      lock.unlock();
      leave_computing_core();
      const BlockOutcome outcome = move_block(transfer->request, transfer->direct, block);
      const double end = monotonic_seconds();
      lock.lock();
      end_block(*transfer, block, outcome, end);
      if (next()) wake.notify_one();  // a thread that the limit of a direction has kept waiting
    }
  }

  size_t begin_block(IoTransfer& transfer) {
    const size_t block = transfer.next++;
    ++transfer.running;
    ++of(transfer).running;
    read_last = transfer.request.kind == IoKind::Read;
    if (block == 0) transfer.state.start = monotonic_seconds();
    if (transfer.next == transfer.num_blocks) of(transfer).waiting.pop_front();
    return block;
  }

  void end_block(IoTransfer& transfer, size_t block, const BlockOutcome& outcome, double end) {
    IoState& state = transfer.state;
    --transfer.running;
    --of(transfer).running;
    transfer.last_end = std::max(transfer.last_end, end);
    state.nbytes += outcome.nbytes;
    if (outcome.failed()) {
      drop_rest(transfer);
      if (state.failed_block < 0 || int64_t(block) < state.failed_block) {
        state.failed_block = int64_t(block);
        state.error = outcome.error;
        state.end_of_file = outcome.end_of_file;
        state.checksum_mismatch = outcome.checksum_mismatch;
      }
    }
    finish_if_all_ended(transfer);
  }

  // Whether there was a rest.
  bool drop_rest(IoTransfer& transfer) {
    if (transfer.next == transfer.num_blocks) return false;
    transfer.next = transfer.num_blocks;
    auto& waiting = of(transfer).waiting;
    waiting.erase(std::find_if(waiting.begin(), waiting.end(), [&](const auto& one) { return one.get() == &transfer; }));
    return true;
  }

  void finish_if_all_ended(IoTransfer& transfer) {
    IoState& state = transfer.state;
    if (state.done || transfer.running != 0 || transfer.next != transfer.num_blocks) return;
    if (std::isnan(state.start)) state.start = transfer.last_end = monotonic_seconds();  // no block was begun
    state.end = transfer.last_end;
    state.done = true;
    transfer.ended.notify_all();
  }

  void join() {
    const std::lock_guard<std::mutex> turn(joining);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      closed = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

IoTicket::~IoTicket() {
  // A condition variable that the parent's threads waited on cannot be destroyed in a forked child: leak it.
  if (transfer_ != nullptr && !transfer_->queue->is_owner())
    static_cast<void>(new std::shared_ptr<IoTransfer>(std::move(transfer_)));
}

bool IoTicket::wait(double seconds) const {
  IoQueue& queue = *transfer_->queue;
  queue.check_owner();
  if (std::isnan(seconds)) throw std::invalid_argument("timeout is NaN, must be seconds, or None for no limit");
  const auto done = [&] { return transfer_->state.done; };
  std::unique_lock<std::mutex> lock(queue.mutex);
  if (seconds < kLongestWaitSeconds)
    return transfer_->ended.wait_for(lock, std::chrono::duration<double>(std::max(seconds, 0.0)), done);
  transfer_->ended.wait(lock, done);
  return true;
}

void IoTicket::cancel() const {
  IoQueue& queue = *transfer_->queue;
  queue.check_owner();
  const std::lock_guard<std::mutex> lock(queue.mutex);
  if (queue.drop_rest(*transfer_)) transfer_->state.cancelled = true;
  queue.finish_if_all_ended(*transfer_);
}

IoState IoTicket::state() const {
  transfer_->queue->check_owner();
  const std::lock_guard<std::mutex> lock(transfer_->queue->mutex);
  return transfer_->state;
}

bool IoTicket::ok() const {
  const IoState now = state();
  return now.done && now.failed_block < 0 && !now.cancelled;
}

IoPool::IoPool(int num_threads, int kept_free)
    : num_threads_(num_threads), queue_(std::make_shared<IoQueue>(size_t(std::max(num_threads - kept_free, 1)))) {
  if (num_threads < 1) throw std::invalid_argument("threads is " + std::to_string(num_threads) + ", must be 1 or more");
  if (kept_free < 0 || kept_free >= num_threads)
    throw std::invalid_argument("kept_free is " + std::to_string(kept_free) + ", must be in 0.." +
                                std::to_string(num_threads - 1));
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < num_threads; ++i) {
      std::thread& worker = queue_->workers.emplace_back([queue = queue_.get()] { queue->work(); });
      pthread_setname_np(worker.native_handle(), "tidegate-io");
    }
  } catch (...) {
    queue_->join();  // a joinable std::thread must not be destroyed
    throw;
  }
}

IoPool::~IoPool() {
  if (queue_->is_owner())
    queue_->join();
  else
    static_cast<void>(new std::shared_ptr<IoQueue>(std::move(queue_)));
}

IoTicket IoPool::submit(const IoRequest& request) {
  queue_->check_owner();
  const bool direct = is_direct(request.fd);
  check(request, direct);
  const auto transfer = std::make_shared<IoTransfer>(queue_, request, direct);
  {
    const std::lock_guard<std::mutex> lock(queue_->mutex);
    if (queue_->closed) throw std::runtime_error("this IoPool is closed: make another one");
    if (transfer->num_blocks != 0) queue_->of(*transfer).waiting.push_back(transfer);
    queue_->finish_if_all_ended(*transfer);
  }
  if (transfer->num_blocks == 1)
    queue_->wake.notify_one();
  else
    queue_->wake.notify_all();
  return IoTicket(transfer);
}

void IoPool::close() {
  if (queue_->is_owner()) queue_->join();
}

}  // namespace tidegate
