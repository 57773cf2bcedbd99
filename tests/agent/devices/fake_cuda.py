"""A CUDA runtime without a GPU that does what a GPU may do, at the worst time it may do it.

Work on a stream is put off until somebody waits for it, or done at a random moment before, in any order that the waits
allow. Every access of streams, of the framework and of host threads is held against vector clocks. `drop` names one
wait that is not made: the tests drop each in turn and expect an error.

Device memory kills a process which touches it outside of the fake's own work: what `alloc` gives, and under a whole
engine (`fake_training.watched`) weights and gradients, too. Those are the framework's CPU tensors, whose addresses the
agent sees as they would be on a device; through torch anybody can read them, as on a GPU. What the framework does
happens at once, on a stream called `framework`.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from tests.agent.devices.fake_memory import DEVICE, DevicePages, Registered
from tests.agent.devices.vector_clocks import Clock, Order, RaceError, Range
from tidegate.agent.devices.base import Copy, GradRef, UpdateRun
from tidegate.agent.devices.cuda_runtime import Norms
from tidegate.kernels import ThreadPool, copy, fill, sum_of_squares

FRAMEWORK = "framework"
ADDRESSES = ("weight", "aux", "grad")
"""Of an `UpdateRun`."""


@dataclass(eq=False)
class FakeMarker:
    stream: FakeStream
    place: int
    clock: Clock
    timed: bool = False
    seconds: float | None = None
    """When it was reached; None before."""


@dataclass(eq=False)
class FakeStream:
    name: str
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    """What was not done yet."""
    waits: dict[int, FakeMarker] = field(default_factory=dict)
    """By place: what must be reached before the work there begins."""
    done: int = 0

    @property
    def end(self) -> int:
        return self.done + len(self.queue)


class FakeCuda:
    """See the module. eagerness: 0 does nothing before it must, 1 does everything at once."""

    def __init__(self, seed: int = 0, eagerness: float = 0.3, drop: str = "", memory_bytes: int = 1 << 30) -> None:
        self.order = Order()
        self.drop = drop
        self.sites: set[str] = set()
        """Every wait that was made, by who waits for what where."""
        self.error: RaceError | None = None
        """The first one. From then on nothing is done any more."""
        self.pinned = Registered()
        self.longest_queue = 0
        self.norm_reads: list[int] = []
        """Bytes of gradients that each call of `norms` reads."""
        self.copy_reads: Counter[int] = Counter()
        """Bytes of device memory that copies to the host read, by address."""
        self.update_reads: Counter[int] = Counter()
        """Bytes of gradients that updates on the device read, by address."""
        self.norm_waits = 0
        """How often `MemoryRunner._norm` waited."""
        self.norm_fetches = 0
        """How often results of `norms` came to the host."""
        self.strict = False
        """Device addresses of all tensors are marked as such, and nothing else is taken for one."""
        self.clock: Callable[[], float] = time.monotonic
        """The GPU's."""
        self._memory_bytes = memory_bytes
        self._eagerness = eagerness
        self._random = random.Random(seed)
        self._framework = FakeStream(FRAMEWORK)
        self._streams = [self._framework]
        self._pages = DevicePages()
        self._blocks: dict[int, int] = {}
        """Bytes by address."""
        self._graveyard: list[Any] = []
        """Memory that was given up stays mapped, so that work which comes too late spoils results, not the process."""
        self._freed: deque[tuple[Clock, int, int, Any]] = deque()
        self._spoil_later: list[tuple[list[FakeMarker], int, int]] = []
        self._held: dict[Range, list[FakeMarker]] = {}
        self._results = 1 << 60
        self._peak = 0
        self._pool = ThreadPool(1)
        self._mutex = threading.RLock()

    # ---- order

    def new_stream(self, name: str) -> FakeStream:
        stream = FakeStream(name)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        return self._framework

    def record(self, stream: FakeStream, timed: bool = False) -> FakeMarker:
        with self._mutex:
            self._enter(stream)
            self.order.tick(stream.name)
            marker = FakeMarker(stream, stream.end + 1, dict(self.order.clocks[stream.name]), timed)

            def reach() -> None:
                marker.seconds = self.clock()

            self._enqueue(stream, reach)
            return marker

    def stream_waits(self, stream: FakeStream, marker: FakeMarker) -> None:
        with self._mutex:
            if self._dropped(f"{stream.name} waits for {marker.stream.name}"):
                return
            self._enter(stream)
            self.order.learn(stream.name, marker.clock)
            stream.waits[stream.end] = marker
            self._enqueue(stream, _nothing)

    def host_waits(self, marker: FakeMarker) -> None:
        with self._mutex:
            if self._dropped(f"host waits for {marker.stream.name}"):
                return
            self._run_to(marker)
            self.order.learn(_host(), marker.clock)

    def seconds_between(self, earlier: FakeMarker, later: FakeMarker) -> float:
        with self._mutex:
            if self.error is not None:
                return 0.0
            for marker in (earlier, later):
                assert marker.timed, f"a marker on {marker.stream.name} was made without a time"
                known = self.order.clocks[_host()].get(marker.stream.name, 0)
                if known < marker.clock[marker.stream.name] or marker.seconds is None:
                    self._fail(RaceError(f"A time on {marker.stream.name} is asked for that nobody has waited for."))
            assert earlier.seconds is not None
            assert later.seconds is not None
            return later.seconds - earlier.seconds

    # ---- work

    def copy(self, copies: Sequence[Copy], to_device: bool, stream: FakeStream) -> None:
        at = self._pages.reachable
        with self._mutex:
            self._enter(stream)
            for one in copies:
                host, device = (one.src, one.dst) if to_device else (one.dst, one.src)
                assert self.pinned.holds(host, one.nbytes), f"{host:#x} is not pinned host memory"
                self._require_device(device, one.nbytes)
                if not to_device:
                    self.copy_reads[_real(device)] += one.nbytes
                what = f"a copy on {stream.name}"
                self._checked(lambda one=one, what=what: self.order.copy(  # type: ignore[misc]
                    stream.name, _real(one.dst), _real(one.src), one.nbytes, what
                ))  # fmt: skip
                self._enqueue(stream, lambda one=one: copy(at(one.dst), at(one.src), one.nbytes))  # type: ignore[misc]

    def update(self, runs: Sequence[UpdateRun], stream: FakeStream) -> None:
        with self._mutex:
            self._enter(stream)
            for run in runs:
                for address, nbytes in _ranges(run):
                    self._require_device(address, nbytes)
                self.update_reads[_real(run.grad)] += run.numel * run.grad_dtype.nbytes
                self.update_accesses(stream.name, run)
                self._enqueue(stream, lambda run=run: apply(self._reachable(run), self._pool))  # type: ignore[misc]

    def norms(self, grads: Sequence[GradRef], stream: FakeStream) -> Callable[[], Norms]:
        at = self._pages.reachable
        with self._mutex:
            self._enter(stream)
            self.norm_reads.append(sum(grad.numel * grad.dtype.nbytes for grad in grads))
            first, found = self._results + 1, Norms()
            self._results += len(grads)
            for result, grad in enumerate(grads, start=first):
                nbytes = grad.numel * grad.dtype.nbytes
                self._require_device(grad.address, nbytes)
                self._checked(lambda result=result, grad=grad, nbytes=nbytes: self.order.copy(  # type: ignore[misc]
                    stream.name, result, _real(grad.address), nbytes, "the norm of a gradient", 1
                ))  # fmt: skip
            for g in grads:
                one = lambda g=g: found.append(sum_of_squares(self._pool, at(g.address), g.numel, g.dtype))  # noqa: E731
                self._enqueue(stream, one)

        def read() -> Norms:
            self.norm_fetches += 1
            torn = [self._is_torn_when_read(first + i) for i in range(len(grads))]
            return Norms((math.nan, 0) if bad else found[i] for i, bad in enumerate(torn))

        return read

    def _is_torn_when_read(self, result: int) -> bool:
        """Whether the host reads a sum of a gradient that somebody wrote meanwhile: nobody may use it."""
        with self._mutex:
            torn = self.order.is_torn(result)
            if not torn:
                self.host_access(result, 1, False, "the norms")
            return torn

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        with self._mutex:
            if self.in_use_bytes() + nbytes > self._memory_bytes:
                raise MemoryError("out of memory")
            address = self._pages.map(nbytes)
            self._blocks[address] = max(nbytes, 1)
            fill(self._pages.reachable(address), 0xFF, nbytes)
            self._peak = max(self._peak, self.in_use_bytes())
            # The framework's stream may hold work on it still: that is the order in which its allocator thinks.
            self._enter(self._framework)
            self._access(FRAMEWORK, address, nbytes, True, "what this memory was used for before")
            return address

    def free(self, address: int) -> None:
        with self._mutex:
            self._give_up(dict(self.order.clocks[_host()]), address, self._blocks.pop(address))

    def used_by(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        with self._mutex:
            if self._dropped(f"memory is held for {stream.name}"):
                return
            start = tensor.data_ptr()
            marker = self.record(stream)
            self._held.setdefault((start, start + tensor.numel() * tensor.element_size()), []).append(marker)

    def pin(self, address: int, nbytes: int) -> str:
        with self._mutex:
            self.pinned.add(address, nbytes)
        return ""

    def unpin(self, address: int) -> None:
        with self._mutex:
            nbytes = self.pinned.pop(address)
            self._checked(lambda: self.order.give_up(_host(), address, nbytes, "unpinning memory"))

    def capacity_bytes(self) -> int:
        return self._memory_bytes

    def in_use_bytes(self) -> int:
        return sum(self._blocks.values())

    def take_peak_bytes(self) -> int:
        peak, self._peak = self._peak, self.in_use_bytes()
        return peak

    def near_cpus(self) -> frozenset[int]:
        return frozenset()

    # ---- what the test tells of the framework and of host threads

    def framework_access(self, tensor: torch.Tensor, write: bool, what: str) -> None:
        """The framework has enqueued this on its stream; here it has been done already."""
        with self._mutex:
            self._enter(self._framework)
            self._access(FRAMEWORK, tensor.data_ptr(), tensor.numel() * tensor.element_size(), write, what)

    def reads_of(self, address: int, nbytes: int) -> int:
        """Bytes of this memory that copies to the host and updates on the device have read so far."""
        counts = [*self.copy_reads.items(), *self.update_reads.items()]
        return sum(read for at, read in counts if _real(address) <= at < _real(address) + nbytes)

    def framework_frees(self, address: int, nbytes: int, storage: Any) -> None:
        """A tensor died: its memory may be used again at once, and the bytes are spoiled. Safe inside a collection."""
        self._freed.append((dict(self.order.clocks[_host()]), address, nbytes, storage))

    def host_access(self, address: int, nbytes: int, write: bool, what: str) -> None:
        """The calling thread reads or writes, now."""
        with self._mutex:
            self._drain_freed()
            self._access(_host(), address, nbytes, write, what)

    def update_accesses(self, actor: str, run: UpdateRun) -> None:
        what = f"an update on {actor}"
        for address, nbytes in _ranges(run):
            self._access(actor, address, nbytes, False, what)
            if address != run.grad:
                self._access(actor, address, nbytes, True, what)

    def host_update(self, run: UpdateRun) -> None:
        with self._mutex:
            for address, nbytes in _ranges(run):
                self.require_host(address, nbytes)
            self.update_accesses(_host(), run)

    def require_host(self, address: int, nbytes: int) -> None:
        """Host code works on memory that the device copies from and to, and on no other."""
        assert self.pinned.holds(address, nbytes), f"{address:#x} is not pinned host memory, and host code works on it"

    def acquired(self, lock: Clock) -> None:
        """The calling thread got a lock: what was done before it was last released is done."""
        with self._mutex:
            self.order.learn(_host(), lock)

    def releasing(self, lock: Clock) -> None:
        with self._mutex:
            self.order.tick(_host())
            for actor, tick in self.order.clocks[_host()].items():
                lock[actor] = max(lock.get(actor, 0), tick)

    # ---- inside

    def _enter(self, stream: FakeStream) -> None:
        """What the calling thread knows is done before what it enqueues now."""
        self._drain_freed()
        self.order.learn(stream.name, self.order.clocks[_host()])

    def _enqueue(self, stream: FakeStream, work: Callable[[], None]) -> None:
        if self.error is not None:
            return
        stream.queue.append(work)
        self.longest_queue = max(self.longest_queue, len(stream.queue))
        if stream is self._framework:
            self._run_to(FakeMarker(stream, stream.end, {}))
        while self._random.random() < self._eagerness:
            ready = [s for s in self._streams if s.queue and self._may_begin(s)]
            if not ready:
                break
            self._run_next(self._random.choice(ready))

    def _may_begin(self, stream: FakeStream) -> bool:
        wait = stream.waits.get(stream.done)
        return wait is None or wait.stream.done >= wait.place

    def _run_to(self, marker: FakeMarker) -> None:
        while self.error is None and marker.stream.done < marker.place:
            wait = marker.stream.waits.get(marker.stream.done)
            if wait is not None:
                self._run_to(wait)
            self._run_next(marker.stream)

    def _run_next(self, stream: FakeStream) -> None:
        stream.waits.pop(stream.done, None)
        work = stream.queue.popleft()
        stream.done += 1
        work()

    def _access(self, actor: str, address: int, nbytes: int, write: bool, what: str) -> None:
        note = self.order.write if write else self.order.read
        self._checked(lambda: note(actor, _real(address), nbytes, what))

    def _require_device(self, address: int, nbytes: int) -> None:
        on_device = self._pages.hold(address) if self.strict else not self.pinned.holds(address, 1)
        assert on_device or not nbytes, f"{address:#x} is not on the device"

    def _reachable(self, run: UpdateRun) -> UpdateRun:
        found = {at: self._pages.reachable(getattr(run, at)) for at in ADDRESSES}
        return replace(run, tensors=tuple(map(self._pages.reachable, run.tensors)), **found)

    def _checked(self, look: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            look()
        except RaceError as error:
            self._fail(error)

    def _fail(self, error: RaceError) -> None:
        self.error = error
        for stream in self._streams:
            stream.queue.clear()
        raise error

    def _drain_freed(self) -> None:
        while self._freed:
            clock, address, nbytes, storage = self._freed.popleft()
            self._give_up(clock, address, nbytes, storage)
        for markers, address, nbytes in tuple(self._spoil_later):
            if all(marker.seconds is not None for marker in markers):
                fill(self._pages.reachable(address), 0xFF, nbytes)
                self._spoil_later.remove((markers, address, nbytes))

    def _give_up(self, clock: Clock, address: int, nbytes: int, storage: Any = None) -> None:
        """The next to use the memory is ordered after the framework's stream, and after what it was held for; that
        orders nothing else, so that it has an actor of its own."""
        self._graveyard.append(storage)
        markers = self._held.pop((address, address + nbytes), [])
        next_user = f"next user {len(self._graveyard)}"
        for known in (self.order.clocks[FRAMEWORK], clock, *(marker.clock for marker in markers)):
            self.order.learn(next_user, known)
        self._checked(lambda: self.order.give_up(next_user, address, nbytes, "freeing memory"))
        self._spoil_later.append((markers, address, nbytes))

    def _dropped(self, who: str) -> bool:
        place = _place(sys._getframe(2))
        site = f"{who} in {place}"
        self.norm_waits += site.startswith("host waits for device in MemoryRunner._norm ")
        if place:
            self.sites.add(site)
        return site == self.drop or self.error is not None


def _real(address: int) -> int:
    """By which the order of accesses goes."""
    return address & ~DEVICE


def _ranges(run: UpdateRun) -> list[tuple[int, int]]:
    """Addresses and bytes of what an update works on; the gradient is only read."""
    n, form = run.numel, run.weight_format
    sizes = ((run.grad, run.grad_dtype.nbytes), (run.weight, form.weight_bytes))
    tensors = zip(run.tensors, (tensor.nbytes for tensor in run.implementation.rule.tensors), strict=True)
    return [(address, n * size) for address, size in (*sizes, *tensors, (run.aux, form.aux_bytes)) if size]


def apply(run: UpdateRun, pool: ThreadPool) -> None:
    run.implementation.update(pool, run)


def _nothing() -> None:
    return


def _host() -> str:
    return f"thread {threading.current_thread().name}"


def _place(frame: FrameType | None) -> str:
    """Where a wait is made: for a dependency of the plan the two kinds of op, else the innermost functions, one of the
    device's own or two of the engine's. Empty where a test waits."""
    names: list[str] = []
    while frame is not None and len(names) < 2:
        name, in_agent = frame.f_code.co_qualname, "/agent/" in frame.f_code.co_filename
        if name == "Executor._run" and names == ["MemoryRunner.wait"]:
            return _dependency(frame.f_locals)
        passed_on = name in (
            "StreamWork.wait",
            "CudaDevice.wait",
            "CudaDevice.block",
            "CudaDevice.used_by",
        ) or name.endswith(">")
        if in_agent and "/tests/" not in frame.f_code.co_filename and not passed_on:
            names.append(name)
            if "/devices/" in frame.f_code.co_filename:
                break
        frame = frame.f_back
    return " < ".join(names)


def _dependency(local: dict[str, Any]) -> str:
    op, ops = local["op"], local["execution"].plan.ops
    (before,) = (ops[place] for place, run, *_ in local["self"]._lanes.issued_from() if run == local["number"])
    return f"{op.kind} after {before.kind if before.id in op.deps else 'a repeated copy'}"
