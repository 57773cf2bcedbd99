"""The CUDA device under the whole engine, over a runtime that does everything at the worst moment.

The heart is `test_without_this_wait_something_goes_wrong`: each wait that device and engine make is left out once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.agent.devices.fake_cuda import FakeCuda
from tests.agent.devices.fake_memory import dies_of
from tests.agent.devices.fake_training import FakeTraining, fake_training
from tests.agent.engine.deferring import LONG, deferring
from tests.agent.engine.test_exactness import make_params, random_grads
from tests.agent.optimizer.background import update_in_background
from tests.services import until
from tidegate.agent.devices.base import Copy, DoneEvent, GradRef
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.engine.op_runner import MemoryRunner
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.gradients.gradients import grad_ref_of
from tidegate.agent.parameters.subgroups import Layout
from tidegate.kernels import GradDtype
from tidegate.plan import Plan
from tidegate.plan.ops import CPU, D2H, DEVICE, H2D, Op, OpKind

SHAPES = [((40, 3), 0), ((77,), 1), ((5, 11), 2), ((3,), 0), ((130,), 0), ((64,), 1), ((90,), 2)]


Scenario = Callable[[str], FakeCuda]
"""Runs with one wait left out; "" for none."""


@dataclass(frozen=True)
class Case:
    """One way to train, all of it from `seed`."""

    seed: int
    policy: Any = "interleaved"
    gradients: Any = "keep"
    background: bool = False
    stored: bool = False
    """State lives on two paths."""

    def __call__(self, drop: str) -> FakeCuda:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            return self.train(drop, {"nvme": one, "pfs": other} if self.stored else {})

    def train(self, drop: str, paths: dict[str, str]) -> FakeCuda:
        choices = random.Random(self.seed)
        fake = FakeCuda(self.seed, eagerness=choices.choice((0.0, 0.2, 0.6)), drop=drop)
        with (
            deferring(LONG if self.seed % 2 else 0.0),
            fake_training(
                fake,
                make_params(SHAPES, self.seed),
                choices.choice((None, 0.7)),
                stride=choices.choice(("off", 1.0, 2.0)),
                static_ratio=choices.choice((0.0, 0.5)),
                subgroup_numel=choices.choice((20, 50, 120)),
                num_slots=choices.choice((1, 2, 3)),
                policy=self.policy,
                gradients=self.gradients,
                gradient_memory_bytes=choices.choice((0, 1, 400)),
                paths=paths,
                **self.storage(choices),
            ) as training,
        ):
            if self.background:
                update_in_background(training.optimizer)
            for step in range(7):
                one_step(training, choices, 100 * self.seed + 10 * step)
            training.optimizer.wait()
            training.forward()
        return fake

    def storage(self, choices: random.Random) -> dict[str, Any]:
        if not self.stored:
            return {}
        return {
            "host_cache": choices.choice((0, 1500, 4000)),
            "order": choices.choice(("pinned", "alternate")),
            "tier_split": choices.choice(("nvme:1,pfs:1", "nvme:1")),
            "host_slots": choices.choice((1, 2, 3)),
        }


def one_step(training: FakeTraining, choices: random.Random, seed: int) -> None:
    """What training scripts do between two steps, in any mixture."""
    optimizer, params = training.optimizer, training.params
    kept = optimizer.offload.gradients == "keep"

    def sometimes() -> bool:
        return choices.random() < 0.3

    training.zero_grad(set_to_none=sometimes() or sometimes())
    if sometimes():
        training.edit(choices.randrange(len(params)), 0.5)
    if sometimes():
        training.backward(random_grads(params, seed + 9, some=False))
        training.zero_grad()
    micro_batches = choices.choice((1, 1, 2, 3))
    for micro in range(micro_batches):
        if micro and kept and sometimes():
            training.discard_grads()
        grads = random_grads(params, seed + micro, some=sometimes())
        with contextlib.nullcontext() if kept or micro == micro_batches - 1 else optimizer.accumulate():
            training.backward(grads)
    if kept:
        change_gradients(training, choices)
        if sometimes():
            training.edit(choices.randrange(len(params)), -1.5)
    training.step()
    if sometimes():
        optimizer.load_state_dict(optimizer.state_dict())
    knobs = (choices.choice(("off", 1.0, 1.7, 3.0)), choices.choice((0.0, 0.3, 0.6, 1.0)))
    now = optimizer.knobs
    optimizer.apply_knobs(dataclasses.replace(now, stride=knobs[0], static_ratio=knobs[1]))


def change_gradients(training: FakeTraining, choices: random.Random) -> None:
    if choices.random() < 0.3:
        training.scale_grads(0.5)
    if choices.random() < 0.3:
        training.assign_grad(choices.randrange(2))
    if choices.random() < 0.2:
        training.poison_grads()


KEPT = [Case(seed) for seed in range(10)]
RELEASED = [Case(seed, gradients="release") for seed in range(10)]
OVERLAPPED = [Case(seed, gradients="release", background=True) for seed in range(10)]
STORED = [Case(seed, gradients=mode, stored=True) for seed in range(10) for mode in ("keep", "release")]
STORED += [Case(seed, gradients="release", background=True, stored=True) for seed in range(5)]
BASELINES = [Case(seed, policy=policy) for seed in range(3) for policy in ("sequential", "twinflow")]


@functools.cache
def undisturbed(scenario: Scenario) -> FakeCuda:
    return scenario("")


@pytest.fixture(autouse=True, scope="module")
def _forgotten_at_the_end() -> Iterator[None]:
    """They are large."""
    yield
    undisturbed.cache_clear()


ALL = [*KEPT, *RELEASED, *OVERLAPPED, *STORED, *BASELINES]
QUICK_SEEDS = 3
"""`make test-all` takes the other seeds, too."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c.seed >= QUICK_SEEDS else ()) for c in ALL], ids=str
)
def test_equals_the_oracle_without_a_race(case: Case) -> None:
    fake = undisturbed(case)
    assert fake.error is None
    assert fake.longest_queue > 4, "work was put off"


@dataclass(frozen=True)
class FailingStep:
    """A lane raises while others have work on the way. A checkpoint is loaded, training goes on, and it fails again."""

    lane: str
    after: int

    def __call__(self, drop: str) -> FakeCuda:
        fake = FakeCuda(eagerness=0.0, drop=drop)
        params = make_params(SHAPES, 1)
        with fake_training(fake, params, stride=2.0, static_ratio=0.3, subgroup_numel=20) as training:
            training.train(random_grads(params, 1, some=False))
            weights, state = training.weights(), training.optimizer.state_dict()
            for step in (2, 3):
                with training.broken_lane(self.lane, self.after), pytest.raises(ValueError, match="broken on purpose"):
                    training.train(random_grads(params, step, some=False))
                training.restore(weights, state)
            training.train(random_grads(params, 4, some=False))
            with training.broken_lane(self.lane, self.after), pytest.raises(ValueError, match="broken on purpose"):
                training.train(random_grads(params, 5, some=False))
        return fake


def closed_with_copies_on_the_way(drop: str) -> FakeCuda:
    """Somebody who uses the device without the engine and closes it at once."""
    fake = FakeCuda(eagerness=0.0, drop=drop)
    device = CudaDevice(fake)
    there, back = device.host_buffer(64), device.host_buffer(64)
    first, second = device.alloc(64), device.alloc(64)
    for lane in (H2D, D2H):
        device.wait(lane, device.now())
    device.copy(H2D, [Copy(first, there.data_ptr(), 64)])
    device.copy(D2H, [Copy(back.data_ptr(), second, 64)])
    del there, back
    device.close()
    return fake


def dropped_at_work(drop: str) -> FakeCuda:
    """Somebody who neither waits nor closes the device."""
    fake = FakeCuda(eagerness=0.0, drop=drop)
    device = CudaDevice(fake)
    address = device.alloc(400)
    device.wait(DEVICE, device.now())
    device.norms([GradRef(address, 100, GradDtype.F32)])
    del device
    gc.collect()
    return fake


def gradients_changed_after_they_were_copied(drop: str) -> FakeCuda:
    """All but one: its update is the first, and the only one whose wait for a copy is in the plan."""
    fake = FakeCuda(eagerness=0.0, drop=drop)
    params = make_params([((50,), 0)] * 6, 0)
    with fake_training(fake, params, stride="off", subgroup_numel=50) as training:
        training.backward(random_grads(params, 0, some=False))
        executor = training.optimizer.engine._executor
        until(lambda: len(executor.done_early()) == len(params), "early copies")
        training.scale_grads(-1.0, params[1:])
        training.step()
        training.forward()
    return fake


@dataclass(frozen=True)
class DeferringStep:
    """Steps with deferred flushes; a model that waits for nothing reads the weights when `step()` has returned."""

    stride: Any
    shapes: tuple[tuple[int, int], ...] = tuple((50, kind) for kind in (0, 1, 2)) * 6

    def __call__(self, drop: str) -> FakeCuda:
        with tempfile.TemporaryDirectory() as directory, deferring():
            fake = FakeCuda(eagerness=0.0, drop=drop)
            params = make_params([((numel,), kind) for numel, kind in self.shapes], 3)
            with fake_training(
                fake, params, stride=self.stride, subgroup_numel=50, gradients="release", paths={"nvme": directory},
                host_cache=0,
            ) as training:  # fmt: skip
                for step in range(4):
                    training.train(random_grads(params, step, some=False))
                    flight = training.optimizer.engine._flight
                    assert (flight is not None and flight.has_returned) == (step > 0)
                    for param in params:
                        fake.framework_access(param.detach(), False, "reading a weight after step()")
                training.optimizer.wait()
                training.forward()
        return fake


DEFERRING = [DeferringStep("off"), DeferringStep(3.0)]
FAILING = [FailingStep(lane, after) for lane in (CPU, DEVICE, D2H, H2D) for after in (1, 4, 8)]
SCENARIOS: tuple[Scenario, ...] = (
    closed_with_copies_on_the_way,
    dropped_at_work,
    gradients_changed_after_they_were_copied,
    *FAILING,
    *DEFERRING,
    *sorted((*KEPT, *RELEASED, *OVERLAPPED, *STORED), key=lambda case: case.seed),
)
"""Those with few seeds first: most waits are needed by one of them."""


@pytest.mark.parametrize("scenario", FAILING, ids=str)
def test_a_failed_step_leaves_no_work_on_memory_that_is_given_back(scenario: FailingStep) -> None:
    assert undisturbed(scenario).error is None


@pytest.mark.parametrize("scenario", DEFERRING, ids=str)
def test_weights_are_there_when_a_step_with_deferred_flushes_returns(scenario: DeferringStep) -> None:
    assert undisturbed(scenario).error is None


@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_each_gradient_is_read_once_for_the_norm_and_its_result_waited_for_and_fetched_once(gradients: Any) -> None:
    fake = FakeCuda(eagerness=0.3)
    params = make_params(SHAPES, 2)
    size = sum(param.numel() * param.element_size() for param in params)
    with fake_training(fake, params, 0.7, stride=2.0, subgroup_numel=120, gradients=gradients) as training:
        for step in range(3):
            training.train(random_grads(params, step, some=False))
            assert sum(fake.norm_reads) == (step + 1) * size
            assert fake.norm_fetches == sum(nbytes > 0 for nbytes in fake.norm_reads)
            assert fake.norm_waits == len(fake.norm_reads), "once for each event, not for each parameter"
        training.forward()


def test_only_gradients_that_changed_after_their_sum_are_summed_again() -> None:
    fake = FakeCuda(eagerness=0.3)
    params = make_params([((50,), 0)] * 6, 0)
    with fake_training(fake, params, 0.7, stride="off", subgroup_numel=50) as training:
        training.backward(random_grads(params, 0, some=False))
        until(lambda: len(fake.norm_reads) == len(params), "early sums")
        training.scale_grads(-1.0, params[1:])
        training.step()
        training.forward()
    assert fake.norm_reads[len(params) :] == [sum(param.numel() * param.element_size() for param in params[1:])]


@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize("static_ratio", [0.0, 0.4])
def test_each_gradient_is_read_by_copies_and_updates_as_often_as_the_plan_says(
    gradients: Any, static_ratio: float
) -> None:
    fake = FakeCuda(eagerness=0.3)
    params = make_params(SHAPES, 2)
    knobs = {"stride": 2.0, "subgroup_numel": 120, "gradients": gradients, "static_ratio": static_ratio}
    with fake_training(fake, params, 0.7, **knobs) as training:
        plans: list[Plan] = []
        training.optimizer.observers.append(lambda result, _: plans.append(result.plan))
        layouts = training.optimizer.engine.layouts
        for step in range(3):
            fake.copy_reads.clear()
            fake.update_reads.clear()
            training.train(random_grads(params, step, some=False))
            copies, updates = plans[-1].of_kind(OpKind.GRAD_D2H), plans[-1].of_kind(OpKind.DEVICE_UPDATE)
            expected: Counter[int] = Counter()
            for op in (*copies, *(op for op in updates if not op.spilled)):
                for segment in layouts[op.subgroup].segments:
                    expected[segment.param] += segment.numel * params[segment.param].element_size()
            assert copies
            assert updates
            assert {i: fake.reads_of(*place) for i, place in training.places.items()} == expected
        training.forward()


def copied_by_the_host(runner: MemoryRunner, op: Op, layout: Layout) -> IssuedOp:
    """As `_grad_d2h` might be written by who takes a device address for a host address."""
    base, size = runner._memory.on_host(op.host_grad), layout.format.grad_bytes
    for segment, arrived in zip(layout.segments, runner._gradients.records_of(layout), strict=True):
        assert arrived is not None
        address = grad_ref_of(arrived).address + segment.offset * size
        ctypes.memmove(base + segment.start * size, address, segment.numel * size)
    return IssuedOp(DoneEvent(0.0, 0.0), op.nbytes, 0)


def read_weights(runner: MemoryRunner, op: Op) -> IssuedOp:
    """An update that takes the weights on the device for their mirror."""
    layout = runner._memory.layouts[op.subgroup]
    ctypes.string_at(runner._weight_address(layout.segments[0], layout.format.weight_bytes), 4)
    return IssuedOp(DoneEvent(0.0, 0.0), 0, 0)


@pytest.mark.parametrize(("method", "wrong"), [("_grad_d2h", copied_by_the_host), ("_cpu_update", read_weights)])
def test_host_code_that_reads_weights_or_gradients_on_the_device_dies(
    method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryRunner, method, wrong)

    def train() -> None:
        params = make_params(SHAPES, 0)
        with fake_training(FakeCuda(), params, stride="off", subgroup_numel=50) as training:
            training.train(random_grads(params, 0, some=False))

    assert dies_of(train) == signal.SIGSEGV


# ---- every wait

NEEDED = (
    # What the plan says.
    "d2h waits for device in state_d2h after device_update",
    "device waits for h2d in device_update after grad_h2d",
    "device waits for h2d in device_update after state_h2d",
    "h2d waits for d2h in grad_h2d after grad_d2h",
    "h2d waits for d2h in state_h2d after state_d2h",
    "host waits for d2h in cpu_update after a repeated copy",
    "host waits for d2h in cpu_update after grad_d2h",
    # With paths: slots in host memory are used again, and state comes and goes by way of them.
    "d2h waits for h2d in weight_d2h after weight_h2d",
    "host waits for d2h in cpu_update after state_d2h",
    "host waits for d2h in cpu_update after weight_d2h",
    "host waits for d2h in flush after state_d2h",
    "host waits for h2d in fetch after state_h2d",
    # Between the framework and the lanes.
    "d2h waits for framework in Engine._order_after_framework < Engine._launch",
    "d2h waits for framework in MemoryRunner._grad_d2h < MemoryRunner.run",
    "device waits for framework in Engine._order_after_framework < Engine.step",
    "device waits for framework in MemoryRunner._grad_norm < MemoryRunner.run",
    "framework waits for device in Engine.wait_for_weights < Optimizer._wait_for_weights",
    "framework waits for h2d in Engine.wait_for_weights < Optimizer._wait_for_weights",
    "h2d waits for framework in Engine._order_after_framework < Engine._launch",
    # Where the host looks at what lanes have done.
    "host waits for device in Executor.wait_until_done < Engine.wait_for_step",
    "host waits for h2d in Executor.wait_until_done < Engine.wait_for_step",
    "host waits for d2h in StateMemory._load_to_host < StateMemory.arrays",
    "host waits for d2h in PlanExecution.all_spans < Executor.cancel",
    "host waits for d2h in PlanExecution.all_spans < Executor.finish",
    "host waits for device in GradientMemory.wait_for_oldest < GradientRouting.wait_for_memory",
    "host waits for device in MemoryRunner._norm < MemoryRunner.run",
    "host waits for device in PlanExecution.all_spans < Executor.cancel",
    "host waits for device in PlanExecution.all_spans < Executor.finish",
    "host waits for h2d in StateMemory._store_back < StateMemory.arrays",
    "host waits for h2d in PlanExecution.all_spans < Executor.cancel",
    "host waits for h2d in PlanExecution.all_spans < Executor.finish",
    "host waits for clock in HostClock._compare_once",
    # Before memory is given back.
    "memory is held for d2h in Gradients.was_read < MemoryRunner._grad_d2h",
    "memory is held for d2h in MemoryRunner._grad_d2h < MemoryRunner.run",
    "memory is held for device in Gradients.was_read < MemoryRunner._device_update",
    "memory is held for device in Gradients.was_read < MemoryRunner._grad_norm",
    "host waits for d2h in LaneStreams._wait",
    "host waits for d2h in _wait_after_failure < Executor.finish",
    "host waits for device in LaneStreams._wait",
    "host waits for device in _wait_after_failure < Executor.finish",
    "host waits for h2d in LaneStreams._wait",
    "host waits for h2d in _wait_after_failure < Executor.finish",
)

IMPLIED = {
    "host waits for device in cpu_update after norm": "NORM waits for its own result before it counts as issued",
    "host waits for d2h in GradientMemory.wait_for_oldest < GradientRouting.wait_for_memory": (
        "it bounds memory and orders nothing"
    ),
}
"""Waits that results do not need: another one makes them needless, and they are made because the plan has the
dependency, whatever runs it; or memory needs them (`test_enqueue_ahead.py`)."""


@pytest.mark.slow
def test_these_are_all_waits() -> None:
    """Of the full engine: the baselines also wait so as to do one thing at a time."""
    found = set().union(*(undisturbed(scenario).sites for scenario in SCENARIOS))
    assert found == {*NEEDED, *IMPLIED}


@pytest.mark.parametrize("wait", NEEDED)
def test_without_this_wait_something_goes_wrong(wait: str) -> None:
    assert any(goes_wrong(scenario, wait) for scenario in SCENARIOS if wait in undisturbed(scenario).sites)


@pytest.mark.slow
@pytest.mark.parametrize("wait", IMPLIED)
def test_this_wait_is_implied_by_another(wait: str) -> None:
    made_in = [scenario for scenario in SCENARIOS if wait in undisturbed(scenario).sites]
    assert not any(goes_wrong(scenario, wait) for scenario in made_in[:8])


def goes_wrong(scenario: Scenario, wait: str) -> bool:
    """With this wait left out: a race is found, or weights are not the oracle's."""
    try:
        fake = scenario(wait)
    except (AssertionError, pytest.fail.Exception):
        return True
    return fake.error is not None
