"""What users do at awkward moments. Each of these once gave wrong weights, a dead run or a leak."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tests.services import until
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.optimizer.auto_knobs import AutoValues
from tidegate.errors import ConfigError, EngineError, LaneStuckError, MemoryBudgetError, ParameterError
from tidegate.knobs.knobs import Knobs
from tidegate.plan.ops import Op, OpKind
from tidegate.speeds.dispatch_latency import StepTrace
from tidegate.timeline.step_result import StepResult

ON_CPU = tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST, cpu_threads=1)


def plain_of(optimizer: tidegate.AdamW) -> PlainAdamW:
    return PlainAdamW([dict(group) for group in optimizer.param_groups])


def grads_of(params: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in params]


# ---- gradients


@pytest.mark.parametrize("policy", ["interleaved", "sequential", "twinflow"])
def test_some_gradients_changed_after_their_early_copy(policy: Any) -> None:
    params = params_of(*[(50,)] * 10)
    offload = tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST, policy=policy)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        # Copying again must take longer than an update does, or a missing wait goes unseen.
        slow_copies(optimizer.device)
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            copied_early(optimizer, 10)
            for p in params[1:]:
                p.grad.mul_(-1)  # type: ignore[union-attr]
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


def copied_early(optimizer: tidegate.AdamW, count: int) -> None:
    """Waits until so many gradients were copied: those that change afterwards must be copied again."""
    executor = optimizer.engine._executor
    until(lambda: len(executor.done_early()) == count, "early copies")


def slow_copies(device: Any) -> None:
    assert isinstance(device, EmulatedDevice)
    device.rates.d2h_bytes_per_second = 200 / 0.005


def test_a_micro_batch_that_leaves_out_a_parameter() -> None:
    params = params_of(*[(50,)] * 10)
    with tidegate.AdamW(params, offload=ON_CPU) as optimizer:
        slow_copies(optimizer.device)
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            backward(params, random_grads(params, step, some=False))
            if step == 0:
                copied_early(optimizer, 10)
            backward(params, [None, *random_grads(params, step + 50, some=False)[1:]])
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


def test_discarded_backwards_whose_memory_is_used_again() -> None:
    """Autograd sets `.grad` without the interpreter's lock: a lane that looked at it would crash sooner or later."""
    params = params_of((64,), (64,), (64,))
    with tidegate.AdamW(params, offload=ON_CPU) as optimizer:
        plain = plain_of(optimizer)
        for step in range(200):
            for discarded in range(3):
                for p in params:
                    p.grad = None
                backward(params, random_grads(params, 100 * step + discarded, some=False))
            for p in params:
                p.grad = None
            backward(params, random_grads(params, 7000 + step, some=False))
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


def test_gradients_freed_while_they_are_copied() -> None:
    params = params_of((2000,), (2000,))
    with tidegate.AdamW(params, offload=ON_CPU) as optimizer:
        slow_copies(optimizer.device)
        plain = plain_of(optimizer)
        for step in range(3):
            backward(params, random_grads(params, 100 + step, some=False))
            for p in params:
                p.grad = None
            backward(params, random_grads(params, step, some=False))
            plain.step(grads_of(params))
            optimizer.step()
            assert plain.same_weights(params)


def test_gradients_that_the_model_dropped_are_not_kept_alive() -> None:
    model = torch.nn.Linear(500, 500)
    offload = tidegate.Offload(stride=2.0, subgroup_numel=50_000, emulated=FAST)
    with tidegate.AdamW(model.parameters(), offload=offload) as optimizer:
        model(torch.ones(2, 500)).sum().backward()
        optimizer.step()
        before = optimizer.device.in_use_bytes
        model.zero_grad()
        gc.collect()
        assert optimizer.device.in_use_bytes == before - 4 * 250_500


# ---- resuming


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_resume_in_the_usual_order(dtype: torch.dtype) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    with tidegate.AdamW(params, lr=0.02, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 3)
        weights, state = [p.detach().clone() for p in params], optimizer.state_dict()
        other = params_of((40, 3), (77,), dtype=dtype)
        with tidegate.AdamW(other, lr=0.02, offload=ON_CPU) as resumed:
            with torch.no_grad():
                for p, weight in zip(other, weights, strict=True):
                    p.copy_(weight)
            resumed.load_state_dict(state)
            run_steps(optimizer, params, 3, 5)
            run_steps(resumed, other, 3, 5)
            assert all(torch.equal(a, b) for a, b in zip(params, other, strict=True))


def test_a_state_saved_after_weights_were_set_belongs_to_them() -> None:
    params = params_of((90,), dtype=torch.float16)
    with tidegate.AdamW(params, lr=0.02, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        with torch.no_grad():
            params[0].fill_(0.5)
        master = optimizer.state_dict()["state"][0]["master"]
        assert (master == 0.5).all()


def test_a_refused_state_changes_nothing() -> None:
    params = params_of((4, 3), (5,))
    with tidegate.AdamW(params, lr=0.5, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        before = optimizer.state_dict()
        for broken, says in (
            (lambda s: s["state"][1].update(exp_avg=torch.zeros(6)), "shape"),
            (lambda s: s["state"][1].pop("exp_avg_sq"), "has no exp_avg_sq"),
            (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
            (lambda s: s["state"].update({7: s["state"][0]}), "another model"),
            (lambda s: s["state"][1].update(step=2.5), r"parameter 1 .*step=2\.5 .*at least 0"),
            (lambda s: s["state"][1].update(step=torch.tensor(2.5)), r"step=2\.5 .*at least 0"),
            (lambda s: s["state"][1].update(step=torch.tensor(-5.0)), r"step=-5\.0 .*at least 0"),
            (lambda s: s["state"][1].update(step=float("nan")), "step=nan .*at least 0"),
            (lambda s: s["state"][1].update(step=torch.tensor(float("inf"))), "step=inf .*at least 0"),
            (lambda s: s["state"][1].update(step=torch.ones(2)), "step=tensor.* .*at least 0"),
            (lambda s: s["state"][1].update(step="2"), "step='2' .*at least 0"),
            (lambda s: s["state"][1].update(step=None), "step=None .*at least 0"),
            (lambda s: s.update(num_steps=2.5), r"num_steps=2\.5 .*at least 0"),
        ):
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] = 0.1
            broken(state)
            with pytest.raises(ConfigError, match=says):
                optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
        assert after["state"][1]["step"] == 2


def test_an_empty_parameter_resumes() -> None:
    params = [*params_of((3,)), torch.nn.Parameter(torch.empty(0))]
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        (params[0].sum() + params[1].sum()).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())


# ---- interruptions and failures


def test_a_failed_step_says_so_until_a_state_is_loaded() -> None:
    params = params_of((400,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        weights, state = [p.detach().clone() for p in params], optimizer.state_dict()
        runner = optimizer.engine._runner
        run = type(runner).run

        def failing(op: Op, begun: Callable[[], None]) -> IssuedOp:
            if op.kind is OpKind.DEVICE_UPDATE:
                raise ValueError("broken kernel")
            return run(runner, op, begun)

        runner.run = failing  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="broken kernel"):
            run_steps(optimizer, params, 1, 1)
        del runner.run
        with pytest.raises(EngineError, match="broken kernel"):
            optimizer.state_dict()
        with pytest.raises(EngineError, match="broken kernel"):
            run_steps(optimizer, params, 1, 1)
        with torch.no_grad():
            params[0].copy_(weights[0])
        optimizer.load_state_dict(state)
        run_steps(optimizer, params, 1, 2)
    same = params_of((400,))
    with tidegate.AdamW(same, offload=MIXED) as reference:
        run_steps(reference, same, 0, 3)
    assert torch.equal(params[0], same[0])


def test_a_stuck_lane_is_named_and_close_does_not_hang() -> None:
    params = params_of((400,))
    release = threading.Event()
    offload = tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST, watchdog_seconds=0.3)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        runner = optimizer.engine._runner
        run = type(runner).run

        def hanging(op: Op, begun: Callable[[], None]) -> IssuedOp:
            if op.kind is OpKind.CPU_UPDATE:
                release.wait(60)
            return run(runner, op, begun)

        runner.run = hanging  # type: ignore[method-assign]
        optimizer.engine._preparer._prepared = lambda *_: {}  # type: ignore[method-assign]  # all ops go by `run`
        with pytest.raises(LaneStuckError, match="Lane cpu is stuck"):
            run_steps(optimizer, params, 0, 1)
    assert not release.is_set()
    release.set()


def test_a_step_beside_another_one_is_refused_and_harms_nothing() -> None:
    """Two threads, or a closure that steps: what the first one does is right, and the optimizer stays as it was."""
    param = torch.nn.Parameter(torch.ones(100))
    plain = torch.nn.Parameter(torch.ones(100))
    theirs = torch.optim.AdamW([plain], lr=0.1)
    with tidegate.AdamW([param], lr=0.1, offload=tidegate.Offload(stride="off", emulated=FAST)) as optimizer:
        refused: list[EngineError] = []

        def closure() -> float:
            def step() -> None:
                with pytest.raises(EngineError, match="one thread at a time") as error:
                    optimizer.step()
                refused.append(error.value)

            other = threading.Thread(target=step)
            other.start()
            other.join(30)
            step()
            param.grad = torch.ones(100)
            return 1.0

        for _ in range(3):
            assert optimizer.step(closure) == 1.0
            plain.grad = torch.ones(100)
            theirs.step()
        assert len(refused) == 6
        assert torch.allclose(param, plain, rtol=0, atol=1e-6)


def test_a_fork_in_the_middle_of_a_step() -> None:
    params = params_of((40,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except EngineError:
                optimizer.close()
                os._exit(7)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        optimizer.step()


def test_a_state_after_close_is_refused() -> None:
    optimizer = tidegate.AdamW(params_of((3,)), offload=MIXED)
    optimizer.close()
    with pytest.raises(EngineError, match="closed"):
        optimizer.state_dict()


def test_a_constructor_that_fails_leaves_nothing_behind() -> None:
    params, before = params_of((1000,)), threading.active_count()
    small = tidegate.Offload(static_ratio=1.0, subgroup_numel=100, emulated=FAST, device_memory_bytes=9000)
    with pytest.raises(MemoryBudgetError):
        tidegate.AdamW(params, offload=small)
    until(lambda: threading.active_count() == before, "lane threads gone")
    tidegate.AdamW(params, offload=MIXED).close()


def test_an_optimizer_that_nobody_holds_takes_its_threads_and_hooks_along() -> None:
    gc.collect()
    before = threading.active_count()
    params = params_of((400,))
    for step in range(3):
        optimizer = tidegate.AdamW(params, offload=MIXED)
        run_steps(optimizer, params, step, 1)
        backward(params, random_grads(params, 9, some=False))
        gone = weakref.ref(optimizer)
        del optimizer
        until(lambda gone=gone: gc.collect() >= 0 and gone() is None, "the optimizer gone")
        params[0].grad = None
    until(lambda: threading.active_count() == before, "lane threads gone")
    backward(params, random_grads(params, 9, some=False))


# ---- models that change


def test_another_memory_format_is_refused_with_a_remedy() -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    with tidegate.AdamW(model.parameters(), offload=MIXED) as optimizer:
        model(torch.ones(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3, 8, 8)).sum()
        with pytest.raises(ParameterError, match="before building the optimizer"):
            loss.backward()


def test_parameters_without_gradient_keep_their_version() -> None:
    params = params_of((30,), (30,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        other = (params[1] * params[1]).sum()
        params[0].sum().backward()
        optimizer.step()
        other.backward()


# ---- knobs and memory


def test_residents_that_leave_are_counted_with_the_slots_that_come() -> None:
    params = params_of((1000,))
    offload = tidegate.Offload(
        stride="off", static_ratio=0.5, subgroup_numel=100, emulated=FAST, device_memory_bytes=2 * 4000 + 5 * 1024
    )
    with tidegate.AdamW(params, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 2)
        with pytest.raises(MemoryBudgetError, match="Lower static_ratio with stride=off first"):
            optimizer.check_knobs(Knobs(stride=1.0, static_ratio=0.0))
        for knobs in (Knobs(stride="off", static_ratio=0.0), Knobs(stride=1.0, static_ratio=0.0)):
            optimizer.check_knobs(knobs)
            optimizer.apply_knobs(knobs)
            run_steps(optimizer, params, 2, 2)


def test_the_tuner_stays_where_its_choice_would_not_fit() -> None:
    params = params_of((1000,))
    offload = tidegate.Offload(stride="off", static_ratio=0.5, subgroup_numel=100, emulated=FAST,
                               device_memory_bytes=2 * 4000 + 5 * 1024)  # fmt: skip
    with tidegate.AdamW(params, offload=offload) as optimizer:
        optimizer._auto = AutoValues(stride="off")
        optimizer.apply_knobs(Knobs(stride="auto", static_ratio=0.5))
        run_steps(optimizer, params, 0, 1)
        with pytest.raises(MemoryBudgetError):
            optimizer._set_auto(stride=1.0)
        assert optimizer.effective_knobs()["stride"] == "off"
        run_steps(optimizer, params, 1, 1)


def test_a_tuned_stride_survives_another_knob() -> None:
    with tidegate.AdamW(params_of((1000,)), offload=tidegate.Offload(subgroup_numel=100, emulated=FAST)) as optimizer:
        optimizer._set_auto(stride=4.0)
        optimizer.apply_knobs(Knobs(stride="auto", static_ratio=0.1))
        assert optimizer.effective_knobs() == {"stride": 4.0, "static_ratio": 0.1}


# ---- watching


def test_watching_a_plan_whose_device_lane_has_nothing_to_do() -> None:
    params = params_of((50,), (50,))
    params[1].requires_grad_(False)
    with tidegate.AdamW(params, offload=tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST)) as optimizer:
        tidegate.attach(optimizer, run="frozen")
        for _ in range(3):
            optimizer.zero_grad()
            params[0].sum().backward()
            optimizer.step()


def test_phases_do_not_pile_up_when_nobody_watches() -> None:
    params = params_of((50,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 20)
        assert len(optimizer.phases._spans) < 5


def test_a_backward_that_failed_does_not_confuse_phases() -> None:
    params = params_of((50,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        with pytest.raises(RuntimeError, match="on purpose"):
            Failing.apply(params[0] * 2).sum().backward()
        optimizer.zero_grad()
        params[0].sum().backward()
        assert optimizer.phases.current == "other"
        optimizer.step()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("on purpose")


def test_a_second_attachment_is_refused_and_a_failed_one_leaves_no_hooks() -> None:
    model = torch.nn.Linear(5, 5)
    with tidegate.AdamW(model.parameters(), offload=MIXED) as optimizer:
        first = tidegate.attach(optimizer, model, run="one")
        with pytest.raises(ConfigError, match="attached already"):
            tidegate.attach(optimizer, model, run="two", strict=True)
        port = int(first.metrics_address.rpartition(":")[2])
        other = torch.nn.Linear(5, 5)
        with tidegate.AdamW(other.parameters(), offload=MIXED) as second:
            with pytest.raises(ConfigError):
                tidegate.attach(second, other, run="two", metrics_port=port, strict=True)
            assert not other._forward_hooks
            assert not other._forward_pre_hooks
        first.close()
        tidegate.attach(optimizer, model, run="again")


def test_copies_of_a_dropped_plan_are_counted() -> None:
    params = params_of((500,))
    with tidegate.AdamW(params, offload=tidegate.Offload(stride="off", subgroup_numel=500, emulated=FAST)) as optimizer:
        attachment = tidegate.attach(optimizer, run="dropped")
        until(lambda: optimizer.engine._executor is not None, "the engine")
        backward(params, random_grads(params, 0, some=False))
        until(lambda: optimizer.engine._executor.done_early(), "an early copy")
        optimizer.zero_grad()
        backward(params, random_grads(params, 1, some=False))
        optimizer.step()
        moved = attachment.recorder.rows("tidegate_link_bytes_total")
        assert sum(n for (lane, _, content), n in moved.items() if (lane, content) == ("d2h", "gradient")) == 4000


def test_rates_come_from_the_plan_that_ran_not_from_a_dropped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops of a dropped plan have ids that are other ops' in the next."""
    params = params_of((500,))
    with tidegate.AdamW(params, offload=tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST)) as optimizer:
        attachment = tidegate.attach(optimizer, run="dropped")
        results: list[StepResult] = []
        optimizer.observers.append(lambda result, _: results.append(result))
        live, looked_at = attachment.recorder._live, list[StepTrace]()
        observe = live.observe
        monkeypatch.setattr(live, "observe", lambda step, ran: (looked_at.append(ran), observe(step, ran))[1])
        until(lambda: optimizer.engine._executor is not None, "the engine")
        backward(params, random_grads(params, 0, some=False))
        until(lambda: len(optimizer.engine._executor.done_early()) == 10, "early copies")
        optimizer.zero_grad()
        backward(params, random_grads(params, 1, some=False))
        optimizer.step()
        result = results[0]
        attachment.recorder.catch_up()
        [ran] = looked_at
    assert result.num_dropped >= 10
    assert ran.spans == result.spans[result.num_dropped :]
    assert {span.op for span in ran.spans} == set(result.plan.by_id)
