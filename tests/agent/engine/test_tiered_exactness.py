"""State on storage paths, whatever happens between steps: weights and state equal the oracle's bit for bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import tidegate
from tests.agent.engine.deferring import LONG, deferring
from tests.agent.engine.test_exactness import (
    DTYPES,
    FAST,
    SHAPES,
    STRIDES,
    backward,
    make_params,
    random_grads,
    with_special_values,
)
from tests.agent.plain_adamw import PlainAdamW, array
from tests.examples import examples
from tidegate.agent.parameters.subgroups import grad_dtype_of
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.knobs.knobs import Knobs
from tidegate.plan.ops import is_path

PATHS = ("nvme", "pfs", "usb")


@st.composite
def splits(draw: Any) -> str:
    """What `tier_split` may be; paths that are not named, or have weight 0, get nothing."""
    weights = draw(st.lists(st.integers(0, 5), min_size=len(PATHS), max_size=len(PATHS)).filter(any))
    shares = [f"{name}:{weight}" for name, weight in zip(PATHS, weights, strict=True) if draw(st.booleans()) or weight]
    return draw(st.sampled_from(["auto", ",".join(shares)]))


KNOBS = st.builds(
    Knobs,
    stride=STRIDES,
    static_ratio=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    tier_split=splits(),
    host_cache=st.sampled_from([0, 0, 3000, 9000, 10**6, "auto"]),
    order=st.sampled_from(["pinned", "alternate"]),
)


@dataclass(frozen=True)
class Event:
    """What happens before a step; `seed` decides the details."""

    kind: str
    seed: int
    knobs: Knobs


EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["knobs", "knobs", "none", "add", "skip", "round trip", "edit", "edit data", "read", "drop"]),
    seed=st.integers(0, 1000),
    knobs=KNOBS,
)


@contextlib.contextmanager
def directories(names: tuple[str, ...] = PATHS) -> Iterator[dict[str, PathSettings]]:
    """A directory for each path: some on disk, some in memory, with blocks of different sizes."""
    with contextlib.ExitStack() as stack:
        found = {}
        for place, name in enumerate(names):
            parent = "/dev/shm" if place % 2 and Path("/dev/shm").is_dir() else None
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="tidegate-test-"))
            found[name] = PathSettings(
                directory=directory, threads=1 + place, block_bytes=4096 << place, lock_slots=place % 2
            )
        yield found


@dataclass
class Pair:
    """An optimizer with paths and the oracle, of the same parameters in the same order."""

    optimizer: tidegate.AdamW
    plain: PlainAdamW
    params: list[torch.nn.Parameter] = field(default_factory=list)

    @classmethod
    def of(cls, optimizer: tidegate.AdamW, max_grad_norm: float | None) -> Pair:
        groups = [dict(group) for group in optimizer.param_groups]
        return cls(optimizer, PlainAdamW(groups, max_grad_norm), [p for g in groups for p in g["params"]])

    def happens(self, event: Event) -> None:
        match event.kind:
            case "knobs":
                self.optimizer.apply_knobs(event.knobs)
            case "add":
                group = {"params": make_params([((event.seed % 300 + 1,), event.seed % 3)], event.seed), "lr": 0.02}
                self.optimizer.add_param_group(group)
                self.plain.add(dict(self.optimizer.param_groups[-1]))
                self.params += self.optimizer.param_groups[-1]["params"]
            case "round trip":
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            case "edit" | "edit data":
                self._edit(event)
            case "read":
                self.assert_same_state()
            case "drop":
                backward(self.params, random_grads(self.params, event.seed + 1, some=True))
                self.optimizer.zero_grad()

    def _edit(self, event: Event) -> None:
        """The user sets a weight: what is hidden behind its bits starts anew."""
        index = event.seed % len(self.params)
        param, known = self.params[index], self.plain.params[index]
        if event.kind == "edit data":
            param.data.mul_(-0.75)
        else:
            with torch.no_grad():
                param.mul_(-0.75)
        known.weight = array(param)
        if known.aux is not None:
            known.aux = known.weight.astype(np.float32) if known.aux.dtype == np.float32 else np.zeros_like(known.aux)

    def train(self, seed: int, *, micro_batches: int, some: bool, skip: bool) -> None:
        self.optimizer.zero_grad()
        total: list[torch.Tensor | None] = [None] * len(self.params)
        for batch in range(micro_batches):
            grads = with_special_values(random_grads(self.params, seed + 31 * batch, some), seed)
            if skip and batch == 0:
                next((g for g in grads if g is not None and g.numel()), torch.zeros(1)).view(-1)[0] = float("nan")
            wanted = [g if g is None else g.to(grad_dtype_of(p)) for p, g in zip(self.params, grads, strict=True)]
            total = [b if a is None else a if b is None else a + b for a, b in zip(total, wanted, strict=True)]
            with self.optimizer.accumulate() if batch < micro_batches - 1 else contextlib.nullcontext():
                backward(self.params, grads)
        self.optimizer.step()
        self.plain.step(total)
        assert self.plain.same_weights(self.params)

    def assert_same_state(self) -> None:
        """The state of every parameter that was updated, from wherever it is, hidden bits of weights included."""
        state = self.optimizer.state_dict()["state"]
        for index, known in enumerate(self.plain.params):
            if known.step:
                arrays = {"exp_avg": known.exp_avg, "exp_avg_sq": known.exp_avg_sq}
                if known.aux is not None:
                    arrays["master" if known.aux.dtype == np.float32 else "remainder"] = known.aux
                for name, mine in arrays.items():
                    found = state[index][name].flatten().numpy().view(np.uint8)
                    assert np.array_equal(found, mine.view(np.uint8)), (index, name)


@settings(max_examples=examples(100))
@given(
    shapes=st.lists(st.tuples(SHAPES, st.integers(0, 2)), min_size=1, max_size=6),
    subgroup_numel=st.integers(100, 900),
    slots=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    policy=st.sampled_from(["interleaved", "interleaved", "sequential", "twinflow"]),
    start=KNOBS,
    events=st.lists(EVENTS, min_size=2, max_size=6),
    max_grad_norm=st.sampled_from([None, 0.7]),
    gradients=st.sampled_from([("keep", 0), ("release", 0), ("release", 1), ("release", 3000)]),
    micro_batches=st.integers(1, 2),
    wide=st.booleans(),
    some=st.booleans(),
    idle_seconds=st.sampled_from([0.0, LONG, LONG]),
)
def test_equals_the_oracle_whatever_happens_between_steps(
    shapes: list[Any],
    subgroup_numel: int,
    slots: tuple[int, int],
    policy: Any,
    start: Knobs,
    events: list[Event],
    max_grad_norm: float | None,
    gradients: tuple[Any, int],
    micro_batches: int,
    wide: bool,
    some: bool,
    idle_seconds: float,
) -> None:
    params = make_params(shapes, 5, wide)
    with directories() as paths, deferring(idle_seconds):
        offload = tidegate.Offload(
            stride=start.stride, static_ratio=start.static_ratio, tier_split=start.tier_split, order=start.order,
            host_cache=start.host_cache, subgroup_numel=subgroup_numel, num_slots=slots[0], host_slots=slots[1],
            cpu_threads=2, policy=policy, emulated=FAST, gradients=gradients[0],
            gradient_memory_bytes=gradients[1], paths=paths,
        )  # fmt: skip
        with tidegate.AdamW(params, lr=0.03, max_grad_norm=max_grad_norm, offload=offload) as optimizer:
            pair = Pair.of(optimizer, max_grad_norm)
            for step, event in enumerate(events):
                pair.happens(event)
                pair.train(event.seed + step, micro_batches=micro_batches, some=some, skip=event.kind == "skip")
            pair.assert_same_state()
        assert all(not any(Path(path.directory).iterdir()) for path in paths.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_goes_from_path_to_path_to_memory_to_device_and_back(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.randn(257, 31, dtype=torch.float32).to(dtype)) for _ in range(3)]
    tour = [
        Knobs(stride="off", tier_split="nvme:1", host_cache=0),
        Knobs(stride=2.0, tier_split="pfs:1", host_cache=0),
        Knobs(stride=1.0, host_cache=60_000),
        Knobs(stride="off", static_ratio=0.5, host_cache=10**6),
        Knobs(stride=2.0, static_ratio=1.0),
        Knobs(stride=3.0, tier_split="usb:1,nvme:3", host_cache=0, order="alternate"),
        Knobs(stride="off", tier_split="usb:1,nvme:3", host_cache=100_000, order="alternate"),
    ]
    with directories() as paths:
        offload = tidegate.Offload(subgroup_numel=1000, emulated=FAST, paths=paths, host_cache=0)
        with tidegate.AdamW(params, lr=0.02, offload=offload) as optimizer:
            pair = Pair.of(optimizer, None)
            for step, knobs in enumerate(tour):
                pair.happens(Event("knobs", 0, knobs))
                pair.train(step, micro_batches=1, some=False, skip=False)
                optimizer.wait()
                lives = optimizer.engine.memory.residence
                assert lives.count("device") == int(knobs.static_ratio * len(lives) + 0.5)
                if knobs.tier_split != "auto" and not knobs.static_ratio and not knobs.host_cache:
                    assert {where for where in lives if is_path(where)} == set(
                        dict(part.split(":") for part in knobs.tier_split.split(","))
                    )
            pair.assert_same_state()


@pytest.mark.parametrize("kind", ["edit", "edit data"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_hidden_behind_an_edited_weight_starts_anew_on_its_path(dtype: torch.dtype, kind: str) -> None:
    params = [torch.nn.Parameter(torch.randn(3000, dtype=torch.float32).to(dtype))]
    with directories() as paths:
        offload = tidegate.Offload(stride="off", subgroup_numel=1000, emulated=FAST, paths=paths, host_cache=0)
        with tidegate.AdamW(params, lr=0.02, offload=offload) as optimizer:
            pair = Pair.of(optimizer, None)
            for step in range(3):
                pair.train(step, micro_batches=1, some=False, skip=False)
                pair.happens(Event(kind, 0, Knobs()))
            pair.train(9, micro_batches=1, some=False, skip=False)
            pair.assert_same_state()
