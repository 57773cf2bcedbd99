"""Overlap with the next forward: nobody reads a weight that is not updated yet, and results stay the oracle's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

import tidegate
from tests.agent.plain_adamw import PlainAdamW
from tests.examples import examples
from tidegate.agent.optimizer.forward_overlap import units
from tidegate.agent.parameters.subgroups import Layout, flat
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import Knobs
from tidegate.plan.ops import Op, OpKind

SLOW = tidegate.EmulatedRates(h2d_bytes_per_second=4e6, d2h_bytes_per_second=4e6, update_params_per_second=1e6)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # MultiheadAttention reads the weight of its out_proj without calling it.
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(torch.nn.Module):
    """Tied weights, a weight of its own, blocks in a list, and one weight that is read before its module is called."""

    def __init__(self, width: int, depth: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(13, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = torch.nn.Module.__call__

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.norm.bias.add(1.0)
        for block in self.blocks:
            x = self.call(block, x)
        return torch.nn.functional.linear(self.norm(x) * self.scale, self.embedding.weight)


class Poison:
    """Weights that an update has yet to write hold NaN on the device from the moment `step()` may return.

    Those that are updated on the device get their numbers back at the last moment: the update itself reads them.
    """

    def __init__(self, optimizer: tidegate.AdamW) -> None:
        self._engine = optimizer.engine
        self._run = self._engine._runner.run
        self._engine._runner.run = self.run  # type: ignore[method-assign]
        self._begin = self._engine._runner.begin
        self._engine._runner.begin = self.begin  # type: ignore[method-assign]
        self._lock = threading.Lock()
        self._stash: dict[int, list[torch.Tensor]] = {}
        self._copied: set[int] = set()
        self._armed = False

    def run(self, op: Op, begun: Callable[[], None]) -> Any:
        if op.kind is OpKind.DEVICE_UPDATE:
            for part, saved in zip(self._parts(op.subgroup), self._stash.pop(op.subgroup), strict=True):
                part.copy_(saved)
        if op.kind is not OpKind.WEIGHT_D2H:
            issued = self._run(op, begun)
        else:
            with self._lock:
                issued = self._run(op, begun)
                self._copied.add(op.subgroup)
                if self._armed:
                    self._fill(op.subgroup)
        if op.kind is OpKind.NORM:
            self._arm()
        return issued

    def _arm(self) -> None:
        plan = self._engine._in_flight().plan
        to_copy = {op.subgroup for op in plan.of_kind(OpKind.WEIGHT_D2H)}
        with self._lock:
            self._armed = True
            for i, placement in enumerate(plan.placements):
                if placement.processor == "device":
                    self._stash[i] = [part.clone() for part in self._parts(i)]
                if i not in to_copy - self._copied:
                    self._fill(i)

    def begin(self) -> None:
        """A step has ended, or another begins."""
        self._armed = False
        self._copied.clear()
        self._begin()

    def _fill(self, subgroup: int) -> None:
        for part in self._parts(subgroup):
            part.fill_(float("nan"))

    def _parts(self, subgroup: int) -> list[torch.Tensor]:
        layout: Layout = self._engine.layouts[subgroup]
        has = self._engine._runner._step_outcome().has_grad
        # What has no gradient is not updated: it stays.
        return [
            flat(self._engine.params[s.param])[s.offset : s.offset + s.numel] for s in layout.segments if has[s.param]
        ]


class Run:
    """A training run whose gradients are caught on their way, for the oracle."""

    def __init__(self, model: torch.nn.Module, optimizer: tidegate.AdamW, max_grad_norm: float | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        Poison(optimizer)
        self.plain = PlainAdamW([dict(group) for group in optimizer.param_groups], max_grad_norm)
        self.grads: list[torch.Tensor | None] = [None] * len(self.params)
        for i, param in enumerate(self.params):
            param.register_hook(self._catch(i))

    def _catch(self, i: int) -> Callable[[torch.Tensor], None]:
        def catch(grad: torch.Tensor) -> None:
            self.grads[i] = grad.clone() if self.grads[i] is None else self.grads[i] + grad

        return catch

    def train(self, seed: int, micro_batches: int = 1, scale: float = 1.0) -> None:
        for batch in range(micro_batches):
            loss = self.model(tokens(seed + 100 * batch)).square().mean() * scale
            assert torch.isfinite(loss).item() or scale != 1.0, "a weight was read before its update"
            if batch < micro_batches - 1:
                with self.optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        self.optimizer.step()
        self.plain.step(self.grads)
        self.grads = [None] * len(self.params)

    def agrees(self) -> bool:
        return self.plain.same_weights(self.params)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(seed))


EVENTS = st.sampled_from(["train", "train", "evaluate", "model state", "state", "knobs", "accumulate", "skip", "edit"])


@settings(max_examples=examples(100))
@given(
    width=st.sampled_from([4, 8, 12]),
    depth=st.integers(1, 3),
    seed=st.integers(0, 1000),
    subgroup_numel=st.sampled_from([50, 130, 300, 1000]),
    num_slots=st.integers(1, 3),
    stride=st.sampled_from(["off", 1.0, 1.5, 2.0, 3.0]),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    room=st.sampled_from([0, 0, 1]),
    max_grad_norm=st.sampled_from([None, 0.5]),
    events=st.lists(EVENTS, min_size=2, max_size=6),
)
def test_random_runs_equal_the_oracle(
    width: int, depth: int, seed: int, subgroup_numel: int, num_slots: int, stride: Any, ratio: float, room: int,
    max_grad_norm: float | None, events: list[str],
) -> None:  # fmt: skip
    model = Model(width, depth, seed)
    offload = tidegate.Offload(
        stride=stride, static_ratio=ratio, subgroup_numel=subgroup_numel, num_slots=num_slots, emulated=SLOW,
        gradients="release", gradient_memory_bytes=room,
    )  # fmt: skip
    with tidegate.AdamW(model.parameters(), lr=0.01, max_grad_norm=max_grad_norm, offload=offload) as optimizer:
        tidegate.overlap_forward(optimizer, model)
        run = Run(model, optimizer, max_grad_norm)
        run.train(seed)
        for number, event in enumerate(events):
            happen(event, run, seed + number)
        run.train(seed + 50)
        tidegate.wait(optimizer)
        assert run.agrees()


def happen(event: str, run: Run, seed: int) -> None:
    match event:
        case "train":
            run.train(seed)
        case "accumulate":
            run.train(seed, micro_batches=2)
        case "skip":
            run.train(seed, scale=float("inf"))
        case "evaluate":
            run.model.eval()
            assert torch.isfinite(run.model(tokens(seed))).all()
            run.model.train()
            assert run.agrees()
        case "model state":
            assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())
            assert run.agrees()
        case "state":
            state = run.optimizer.state_dict()["state"]
            assert run.agrees()
            for i, mine in enumerate(run.plain.params):
                assert torch.equal(state[i]["exp_avg"].flatten(), torch.from_numpy(mine.exp_avg))
        case "knobs":
            run.optimizer.apply_knobs(Knobs(stride=[1.0, 2.0, "off"][seed % 3], static_ratio=[0.0, 0.6][seed % 2]))
        case "edit":
            tidegate.wait(run.optimizer)
            with torch.no_grad():
                run.params[0].mul_(0.5)
            run.plain.params[0].weight *= 0.5


def overlapped(**settings: Any) -> tuple[Model, tidegate.AdamW]:
    model = Model(8, 3, 0)
    optimizer = tidegate.AdamW(
        model.parameters(),
        offload=tidegate.Offload(**{
            "stride": 2.0, "subgroup_numel": 100, "emulated": SLOW, "gradients": "release", **settings
        }),
    )  # fmt: skip
    return model, optimizer


@pytest.mark.parametrize("evaluate", [False, True])
def test_the_poison_bites_without_the_gates(monkeypatch: pytest.MonkeyPatch, evaluate: bool) -> None:
    # An update of half a second: whoever does not wait for it comes too early.
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4)
    model, optimizer = overlapped(emulated=rates)
    with optimizer, tidegate.overlap_forward(optimizer, model):
        run = Run(model, optimizer, None)
        run.train(0)
        run.train(1)
        monkeypatch.setattr(optimizer, "_wait_for_weights", lambda *_: None)
        if evaluate:
            monkeypatch.setattr(optimizer, "wait", lambda: None)
            with torch.no_grad():
                assert not torch.isfinite(model(tokens(2))).all()
        else:
            with pytest.raises(AssertionError, match="read before its update"):
                run.train(2)
        monkeypatch.undo()


def test_step_returns_before_the_update_is_done() -> None:
    model, optimizer = overlapped()
    with optimizer, tidegate.overlap_forward(optimizer, model):
        seen: list[int] = []
        optimizer.observers.append(lambda result, phases: seen.append(len(result.spans)))
        run = Run(model, optimizer, None)
        run.train(0)
        assert optimizer.engine.running
        assert seen == []
        tidegate.wait(optimizer)
        assert not optimizer.engine.running
        assert len(seen) == 1


def test_reentrant_checkpoints_wait_for_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = overlapped()
    model.call = functools.partial(checkpoint, use_reentrant=True)
    waits: list[bool] = []
    with optimizer, tidegate.overlap_forward(optimizer, model):
        run = Run(model, optimizer, None)
        run.train(0)
        monkeypatch.setattr(optimizer, "wait", lambda: waits.append(torch.is_grad_enabled()))
        model(tokens(1))
        assert waits == []
        monkeypatch.undo()
        run.train(1)
        run.train(2)
        tidegate.wait(optimizer)
        assert run.agrees()


def test_what_is_read_before_its_module_is_called_is_learnt() -> None:
    model, optimizer = overlapped()
    with optimizer, tidegate.overlap_forward(optimizer, model) as overlap:
        Run(model, optimizer, None).train(0)
        names = [name for name, _ in model.named_parameters()]
        assert {names[i] for i in overlap._read_early} == {"norm.bias"}


def test_units_of_a_model() -> None:
    model = Model(4, 2, 0)
    found = {type(module).__name__: len(params) for module, params in units(model)}
    assert found == {"Model": 1, "Embedding": 1, "ModuleList": 0, "Block": 8, "LayerNorm": 2}


def test_after_close_step_waits_again() -> None:
    model, optimizer = overlapped()
    with optimizer:
        overlap = tidegate.overlap_forward(optimizer, model)
        run = Run(model, optimizer, None)
        run.train(0)
        overlap.close()
        overlap.close()
        assert not optimizer.engine.running
        run.train(1)
        assert not optimizer.engine.running
        assert run.agrees()


def test_refusals() -> None:
    model, optimizer = overlapped(gradients="keep")
    with optimizer, pytest.raises(ConfigError, match="release"):
        tidegate.overlap_forward(optimizer, model)
    model, optimizer = overlapped()
    with optimizer, pytest.raises(ConfigError, match=r"torch\.compile"):
        tidegate.overlap_forward(optimizer, torch.compile(model))  # type: ignore[arg-type]
    with optimizer, tidegate.overlap_forward(optimizer, model), pytest.raises(ConfigError, match="for this optimizer"):
        tidegate.overlap_forward(optimizer, model)


def test_the_tail_of_an_update_is_counted_where_it_moved_bytes() -> None:
    # Updates of some 0.1 s, which go on after step().
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=3e5, d2h_bytes_per_second=3e5)
    model, optimizer = overlapped(emulated=rates)
    with optimizer, tidegate.attach(optimizer, model, run="tail") as attachment:
        tidegate.overlap_forward(optimizer, model)
        plans: list[Any] = []
        tails: list[float] = []

        def observe(result: Any, phases: Any) -> None:
            plans.append(result.plan)
            tails.append(max(span.end for span in result.spans) - phases.spans[-1].end)

        optimizer.observers.append(observe)
        for seed in range(5):
            model(tokens(seed)).square().mean().backward()
            optimizer.step()
        tidegate.wait(optimizer)
        recorder = attachment.recorder
        link_bytes = recorder.rows("tidegate_link_bytes_total")
        moved = {lane: sum(plan.link_bytes(lane) for plan in plans) for lane in ("h2d", "d2h")}
        for lane, nbytes in moved.items():
            assert sum(n for (where, _, _), n in link_bytes.items() if where == lane) == nbytes
        assert link_bytes["h2d", "forward", "weight"] > 0
        assert any(tail > 0 for tail in tails)
        spill = recorder.rows("tidegate_update_spill_seconds_total")[()]
        assert spill == pytest.approx(sum(max(tail, 0.0) for tail in tails))
        assert recorder.totals.steps == 5


def test_parameters_outside_the_model_are_refused() -> None:
    model, head = Model(8, 1, 0), torch.nn.Linear(8, 8)
    with (
        tidegate.AdamW(
            [*model.parameters(), *head.parameters()], offload=tidegate.Offload(gradients="release")
        ) as both,
        pytest.raises(ConfigError, match="not in this model"),
    ):
        tidegate.overlap_forward(both, model)


def test_what_is_never_called_or_was_cut_short_is_waited_for() -> None:
    model, optimizer = overlapped()
    with optimizer, tidegate.overlap_forward(optimizer, model) as overlap:
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))  # no such token: the forward fails after the embedding was called
        assert not overlap.in_background
        assert overlap._learner is None
        blocks, model.blocks = model.blocks, torch.nn.ModuleList(list(model.blocks)[:1])
        model(tokens(0)).square().mean().backward()
        model.blocks = blocks
        names = [name for name, _ in model.named_parameters()]
        assert {names[i].split(".")[0] for i in overlap._read_early} == {"blocks", "norm"}
        assert not any(names[i].startswith("blocks.0") for i in overlap._read_early)


def test_averages_of_weights_and_states_of_submodules_are_of_updated_weights() -> None:
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4)
    model, optimizer = overlapped(emulated=rates)
    with optimizer, tidegate.overlap_forward(optimizer, model):
        run = Run(model, optimizer, None)
        run.train(0)
        assert all(torch.isfinite(value).all() for value in model.blocks.state_dict().values())
        tidegate.wait(optimizer)
        average = torch.optim.swa_utils.AveragedModel(model)
        assert torch.isfinite(average(tokens(1))).all()


def test_a_loss_counts_for_the_step_that_it_was_said_before() -> None:
    model, optimizer = overlapped()
    with optimizer, tidegate.attach(optimizer, model, run="losses") as attachment:
        tidegate.overlap_forward(optimizer, model)
        for seed in range(5):
            model(tokens(seed)).square().mean().backward()
            optimizer.log(loss=float(seed), tokens=10)
            optimizer.step()
        tidegate.wait(optimizer)
        assert [step.loss for step in attachment.recorder.take_unreported()] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_an_update_is_predicted_with_the_part_that_runs_after_step() -> None:
    # Of 0.6 s and more, nearly all of it after step() has returned.
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=5e4, d2h_bytes_per_second=5e4)
    model, optimizer = overlapped(emulated=rates)
    with optimizer, tidegate.attach(optimizer, model, run="tail") as attachment:
        tidegate.overlap_forward(optimizer, model)
        errors = []
        for seed in range(5):
            model(tokens(seed)).square().mean().backward()
            optimizer.step()
            attachment.recorder.take_unreported()  # somebody asks after each step
            errors.append(attachment.recorder.totals.prediction_error)
        tidegate.wait(optimizer)
        errors.append(attachment.recorder.totals.prediction_error)
        # One of several predictions: other load on the machine makes single updates longer.
        assert min(error for error in errors if error is not None) < 0.3


def test_weights_loaded_while_an_update_goes_on_are_the_ones_that_stay() -> None:
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4)
    model, optimizer = overlapped(emulated=rates)
    loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    with optimizer, tidegate.overlap_forward(optimizer, model):
        model(tokens(0)).square().mean().backward()
        optimizer.step()
        assert optimizer.engine.running
        model.load_state_dict(loaded)
        tidegate.wait(optimizer)
        assert all((param == 0.25).all() for param in model.parameters())


def test_hooks_of_several_threads_settle_one_update() -> None:
    rates = tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4)
    model, optimizer = overlapped(emulated=rates)
    with optimizer, tidegate.overlap_forward(optimizer, model):
        run = Run(model, optimizer, None)
        seen: list[bool] = []
        optimizer.observers.append(lambda result, _: seen.append(result.skipped))
        run.train(0)
        assert optimizer.engine.running
        with ThreadPoolExecutor(4) as threads:
            for settled in [threads.submit(optimizer._step_results.wait_for_update) for _ in range(4)]:
                settled.result()
        assert len(optimizer._step_results._results) == 1
        run.train(1)
        tidegate.wait(optimizer)
        assert seen == [False, False]
        assert run.agrees()
