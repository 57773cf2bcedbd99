// What Python sees of checksums, direct I/O and locks of paths. The threads touch no Python object; what they write to is kept here.
#include "bind_io.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "checksum.h"
#include "direct_io.h"
#include "gil.h"
#include "path_lock.h"
#include "tasks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidegate {
namespace {

size_t size_of(int64_t value, const char* name) {
  if (value < 0) throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be 0 or more");
  return size_t(value);
}

// A pool that keeps the arrays of checksums alive until their transfers are done, tickets or not.
class BoundPool {
 public:
  BoundPool(int num_threads, int kept_free) : pool_(num_threads, kept_free) {}
  ~BoundPool() { close(); }

  template <IoKind Kind>
  IoTicket submit(int fd, uintptr_t address, int64_t nbytes, int64_t offset, int64_t block_bytes, uintptr_t checksums,
                  nb::object keep) {
    const IoTicket ticket = pool_.submit({Kind, fd, reinterpret_cast<char*>(address), size_of(nbytes, "nbytes"),
                                          off_t(offset), size_of(block_bytes, "block_bytes"),
                                          reinterpret_cast<uint32_t*>(checksums)});
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [](const auto& one) { return one.first.state().done; }),
                kept_.end());
    if (!keep.is_none()) kept_.emplace_back(ticket, std::move(keep));
    return ticket;
  }

  // The caller keeps pool, file and checksums until the task has ended.
  std::shared_ptr<TransferTask> task(bool writes, int fd, uintptr_t address, int64_t nbytes, int64_t offset,
                                     int64_t block_bytes, uintptr_t checksums, int64_t padding,
                                     std::shared_ptr<PathLock> lock, double timeout_seconds,
                                     std::shared_ptr<WriteStop> stop) {
    const IoRequest request{writes ? IoKind::Write : IoKind::Read, fd, reinterpret_cast<char*>(address),
                            size_of(nbytes, "nbytes"), off_t(offset), size_of(block_bytes, "block_bytes"),
                            reinterpret_cast<uint32_t*>(checksums)};
    if (padding < 0 || padding > nbytes)
      throw std::invalid_argument("padding is " + std::to_string(padding) + ", must be in 0.." + std::to_string(nbytes));
    return std::make_shared<TransferTask>(pool_, request, size_t(padding), std::move(lock),
                                          timeout_seconds, std::move(stop));
  }

  void close() {
    const GilReleased released;
    pool_.close();
  }

  int num_threads() const { return pool_.num_threads(); }

 private:
  IoPool pool_;
  std::vector<std::pair<IoTicket, nb::object>> kept_;
};

bool py_wait(const IoTicket& ticket, std::optional<double> timeout) {
  const GilReleased released;
  return ticket.wait(timeout.value_or(std::numeric_limits<double>::infinity()));
}

uint32_t py_crc32c(uintptr_t address, int64_t nbytes, uint32_t seed) {
  const size_t size = size_of(nbytes, "nbytes");
  if (size == 0) return seed;
  if (address == 0) throw std::invalid_argument("address is 0, must be that of nbytes bytes");
  const GilReleased released;
  return crc32c(reinterpret_cast<const void*>(address), size, seed);
}

// The error number of fallocate(2); 0 for none.
int allocate_blocks(int fd, int64_t nbytes) {
  const GilReleased released;
  return fallocate(fd, 0, 0, off_t(nbytes)) == 0 ? 0 : errno;
}

template <auto Field>
auto field_of(const IoTicket& ticket) {
  return ticket.state().*Field;
}

Entered py_enter(PathLock& lock, double timeout_seconds) {
  // Most threads need not wait: then the interpreter lock does not change hands.
  Entered entered = lock.enter(0.0);
  if (entered.acquired || entered.failed_errno != 0 || timeout_seconds <= 0.0) return entered;
  std::optional<GilReleased> released(std::in_place);
  return lock.enter(timeout_seconds, [&] {
    released.reset();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    released.emplace();
  });
}

template <auto Field>
auto count_of(PathLock& lock) {
  return lock.counts().*Field;
}

void bind_locks(nb::module_& m) {
  nb::class_<Entered>(m, "Entered", "What came of an attempt to enter a lock.")
      .def_ro("acquired", &Entered::acquired)
      .def_ro("waited_seconds", &Entered::waited_seconds, "Seconds of waiting for other processes.")
      .def_ro("failed_errno", &Entered::failed_errno, "The errno of locking that failed; 0 after a timeout.")
      .def_ro("failure", &Entered::failure, "Why locking failed; empty after a timeout.");
  nb::class_<PathLock>(m, "PathLock",
                       "The lock of one file between processes, which counts the threads of this process that hold it. Make\n"
                       "one object for each file. A forked child holds nothing of its parent's.")
      .def(nb::new_([](std::string path) { return std::make_shared<PathLock>(std::move(path)); }), "path"_a)
      .def("open", &PathLock::open, "slots"_a,
           "Lets `slots` processes in at once, and opens the file if it is not open. Why it cannot be locked, or ''.")
      .def("enter", &py_enter, "timeout_seconds"_a, "Acquires the lock for the calling thread. Signals end the wait.")
      .def("leave", &PathLock::leave, "Releases the lock for the calling thread, which acquired it.")
      .def_prop_ro("inside", &count_of<&PathLockCounts::inside>, "Threads of this process that hold the lock.")
      .def_prop_ro("waiting", &count_of<&PathLockCounts::waiting>, "Threads of this process that wait for it.")
      .def_prop_ro("queued", &count_of<&PathLockCounts::queued>, "Whether this process waits in line.")
      .def_prop_ro("first", &count_of<&PathLockCounts::first>, "Whether it is the first in line.");
}

}  // namespace

void bind_io(nb::module_& m) {
  bind_locks(m);
  nb::class_<WriteStop>(m, "WriteStop", "Says that a path takes no more state: writes that begin later fail at once.")
      .def(nb::new_([] { return std::make_shared<WriteStop>(); }))
      .def("set", &WriteStop::set);
  nb::class_<IoTicket>(m, "IoTicket",
                       "A transfer that was asked for. Fields may be read while it runs, and are final once `done`. Dropping\n"
                       "the ticket does not stop the transfer. In a forked child everything raises RuntimeError.")
      .def("wait", &py_wait, "timeout"_a.none() = nb::none(),
           "Whether the transfer is done after at most `timeout` seconds; None waits without limit, 0 only looks.")
      .def("cancel", &IoTicket::cancel, "Drops the blocks that no thread has begun; the others end as usual.")
      .def_prop_ro("done", &field_of<&IoState::done>, "Whether no block is left and none runs: memory may be used.")
      .def_prop_ro("ok", [](const IoTicket& ticket) { return ticket.ok(); },
                   "Whether it is done and every block was moved; otherwise the other fields say why not.")
      .def_prop_ro("cancelled", &field_of<&IoState::cancelled>, "Whether `cancel` dropped blocks.")
      .def_prop_ro("end_of_file", &field_of<&IoState::end_of_file>, "Whether the file ended inside `failed_block`.")
      .def_prop_ro("checksum_mismatch", &field_of<&IoState::checksum_mismatch>,
                   "Whether `failed_block` has another checksum than was expected.")
      .def_prop_ro("error", &field_of<&IoState::error>, "The errno of `failed_block`, 0 for none.")
      .def_prop_ro("failed_block", &field_of<&IoState::failed_block>,
                   "The first of the blocks that failed, -1 for none. A failure drops the blocks not yet begun.")
      .def_prop_ro("nbytes", &field_of<&IoState::nbytes>, "Bytes really moved, those of failed blocks included.")
      .def_prop_ro("start", &field_of<&IoState::start>,
                   "When the first block began, in seconds of time.monotonic(); NaN before that.")
      .def_prop_ro("end", &field_of<&IoState::end>,
                   "When the last block ended, in seconds of time.monotonic(); NaN until `done`.");
  nb::class_<BoundPool>(m, "IoPool")
      .def(nb::init<int, int>(), "threads"_a, "kept_free"_a = 0)
      .def_prop_ro("num_threads", &BoundPool::num_threads)
      .def("read", &BoundPool::submit<IoKind::Read>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none())
      .def("write", &BoundPool::submit<IoKind::Write>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none())
      .def("task", &BoundPool::task, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
      .def("close", &BoundPool::close);
  nb::class_<TransferTask, Task>(m, "TransferTask", "A transfer as the work of an op.")
      .def("reset", &TransferTask::reset, "Forgets the last run, so that it may run again. Not while it runs.")
      .def_prop_ro("succeeded", &TransferTask::succeeded, "Whether it has ended, and every block was moved.")
      .def_prop_ro("since", &TransferTask::since, "Since when it is under way; NaN if it is not.")
      .def_prop_ro("entered", &TransferTask::entered, "How it got the lock; None before it asked, and without a lock.")
      .def_prop_ro("ticket", &TransferTask::ticket, "What its threads did; None before it was queued.");
  m.attr("DIRECT_ALIGNMENT") = kDirectAlignment;
  m.def("allocate_blocks", &allocate_blocks);
  m.def("crc32c", &py_crc32c);
}

}  // namespace tidegate
