// What Python sees of checksums and direct I/O. The threads touch no Python object; what they write to is kept here.
#include "bind_io.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "checksum.h"
#include "direct_io.h"
#include "gil.h"
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
  explicit BoundPool(int num_threads) : pool_(num_threads) {}
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
                                     int64_t block_bytes, uintptr_t checksums, int64_t padding) {
    const IoRequest request{writes ? IoKind::Write : IoKind::Read, fd, reinterpret_cast<char*>(address),
                            size_of(nbytes, "nbytes"), off_t(offset), size_of(block_bytes, "block_bytes"),
                            reinterpret_cast<uint32_t*>(checksums)};
    if (padding < 0 || padding > nbytes)
      throw std::invalid_argument("padding is " + std::to_string(padding) + ", must be in 0.." + std::to_string(nbytes));
    return std::make_shared<TransferTask>(pool_, request, size_t(padding));
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

template <auto Field>
auto field_of(const IoTicket& ticket) {
  return ticket.state().*Field;
}

}  // namespace

void bind_io(nb::module_& m) {
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
      .def(nb::init<int>(), "threads"_a)
      .def_prop_ro("num_threads", &BoundPool::num_threads)
      .def("read", &BoundPool::submit<IoKind::Read>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none())
      .def("write", &BoundPool::submit<IoKind::Write>, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none())
      .def("task", &BoundPool::task)
      .def("close", &BoundPool::close);
  nb::class_<TransferTask, Task>(m, "TransferTask", "A transfer as the work of an op.")
      .def_prop_ro("since", &TransferTask::since, "Since when it is under way; NaN if it is not.")
      .def_prop_ro("ticket", &TransferTask::ticket, "What its threads did; None before it was queued.");
  m.attr("DIRECT_ALIGNMENT") = kDirectAlignment;
  m.def("crc32c", &py_crc32c);
}

}  // namespace tidegate
