"""Ctrl-C: the first comes when the engine is at rest, the second at once, and nothing is lost by either."""

from __future__ import annotations

import copy
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import backward, random_grads
from tests.agent.optimizer.test_awkward_moments import plain_of
from tests.agent.optimizer.test_forward_overlap import overlapped, tokens
from tests.agent.optimizer.test_optimizer import MIXED, params_of
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.tiers import scratch
from tidegate.agent.tiers.file_moves import FileMover
from tidegate.agent.tiers.transfers import run_transfer
from tidegate.errors import EngineError
from tidegate.kernels import IoTicket, aligned_buffer
from tidegate.plan import Plan
from tidegate.plan.ops import Op, OpKind


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Also where whoever started the tests in the background had SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_middle_of_an_update_comes_after_it() -> None:
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            grads = random_grads(params, step, some=False)
            backward(params, grads)
            interrupt_at(optimizer, OpKind.DEVICE_UPDATE)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)
        assert optimizer.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize("when", ["backward", "backward, begun anew", "step"])
def test_ctrl_c_while_a_plan_starts_leaves_a_usable_optimizer(when: str) -> None:
    params = params_of((300,))
    with tidegate.AdamW(params, lr=0.1, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        start = optimizer.engine._executor.start

        def interrupted(plan: Plan, *prepared: Any) -> None:
            optimizer.engine._executor.start = start  # type: ignore[method-assign]
            start(plan, *prepared)
            os.kill(os.getpid(), signal.SIGINT)

        grads = random_grads(params, 0, some=False)
        if when == "step":
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        optimizer.engine._executor.start = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.step() if when == "step" else backward(params, grads)
        if when == "backward, begun anew":
            optimizer.zero_grad()
            backward(params, grads)
        if when != "step":
            optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


def test_ctrl_c_in_wait_loses_no_result() -> None:
    model, optimizer = overlapped(emulated=tidegate.EmulatedRates(h2d_bytes_per_second=6e4, d2h_bytes_per_second=6e4))
    with optimizer, tidegate.overlap_forward(optimizer, model):
        seen: list[bool] = []
        optimizer.observers.append(lambda result, _: seen.append(result.skipped))
        model(tokens(0)).square().mean().backward()
        optimizer.step()
        assert optimizer.engine.running
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            tidegate.wait(optimizer)
        assert not optimizer.engine.running
        tidegate.wait(optimizer)
        assert seen == [False]


def test_the_second_ctrl_c_is_let_through_however_deep() -> None:
    reached: list[int] = []

    def interrupted_twice() -> None:
        with DelayInterrupt(), DelayInterrupt(), DelayInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_ctrl_c_comes_at_the_end_of_the_outermost_block() -> None:
    reached: list[int] = []

    def interrupted_once() -> None:
        with DelayInterrupt():
            with DelayInterrupt():
                signal.raise_signal(signal.SIGINT)
                reached.append(1)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_once()
    assert reached == [1, 2]


@pytest.mark.parametrize("kind", [OpKind.NORM, OpKind.CPU_UPDATE, OpKind.DEVICE_UPDATE])
def test_a_signal_handler_that_saves_in_the_middle_of_an_update_gets_an_error(kind: OpKind, tmp_path: Path) -> None:
    """It would wait for its own thread, or save weights of a step that is not counted yet."""
    params = params_of((400,), (300,))
    refused: list[str] = []
    with tidegate.AdamW(params, offload=MIXED) as optimizer:

        def save(*_: object) -> None:
            for call in (optimizer.state_dict, optimizer.wait, lambda: optimizer.save_checkpoint(tmp_path)):
                with pytest.raises(EngineError, match=r"signal handler.*save after step\(\)") as error:
                    call()
                refused.append(str(error.value))

        before = signal.signal(signal.SIGUSR1, save)
        try:
            plain = plain_of(optimizer)
            interrupt_at(optimizer, kind, signal.SIGUSR1)
            assert trained(params, optimizer, plain, range(3))
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(refused) == 3
        optimizer.save_checkpoint(tmp_path)
        assert optimizer.state_dict()["state"][0]["step"] == 3


def interrupt_at(optimizer: tidegate.AdamW, kind: OpKind, number: signal.Signals = signal.SIGINT) -> None:
    """The next op of this kind is met by a signal to this process."""
    runner = optimizer.engine._runner
    run = type(runner).run
    once = threading.Event()

    def interrupting(op: Op, begun: Callable[[], None]) -> IssuedOp:
        if op.kind is kind and not once.is_set():
            once.set()
            os.kill(os.getpid(), number)
        return run(runner, op, begun)

    runner.run = interrupting  # type: ignore[method-assign]


class SlowTicket:
    """A transfer that ends when it was cancelled, or waited for often enough. In the first waits a handler raises."""

    def __init__(self, raises: int = 1) -> None:
        self.waits = 0
        self.is_cancelled = False
        self._raises = raises

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.waits <= self._raises:
            raise TimeoutError(f"a handler of the user's, time {self.waits}")
        return self.waits > 3

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("raises", [1, 2, 3])
def test_what_interrupts_a_transfer_of_a_checkpoint_is_raised_when_the_transfer_is_over(raises: int) -> None:
    ticket = SlowTicket(raises)
    with pytest.raises(TimeoutError, match="of the user's, time 1"):
        run_transfer(lambda: cast(IoTicket, ticket))
    assert ticket.is_cancelled
    assert ticket.waits == 4


def test_what_interrupts_calibration_twice_is_raised_when_all_transfers_are_over() -> None:
    tickets = {"write": SlowTicket(), "read": SlowTicket()}
    begin = {way: lambda *_, way=way: tickets[way] for way in tickets}
    mover: Any = SimpleNamespace(pool=SimpleNamespace(**begin), _block_bytes=4096, path="nvme")
    with pytest.raises(TimeoutError, match="of the user's, time 1"):
        FileMover.seconds(mover, ("write", "read"), 0, aligned_buffer(4096))
    assert all(ticket.waits > 3 for ticket in tickets.values())


def test_ctrl_c_between_the_begin_of_a_transfer_and_its_wait_comes_after_the_transfer() -> None:
    ticket = SlowTicket()
    ticket.waits = 1

    def begin() -> IoTicket:
        signal.raise_signal(signal.SIGINT)
        return cast(IoTicket, ticket)

    with pytest.raises(KeyboardInterrupt):
        run_transfer(begin)
    assert ticket.waits == 4
    assert not ticket.is_cancelled


def interrupting(calls: int, what: Callable[..., Any], error: BaseException | None = None) -> Callable[..., Any]:
    """`what`, but that SIGINT comes, or the error is raised, in the call of that number."""
    seen = 0

    def called(*given: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == calls:
            if error is not None:
                raise error
            signal.raise_signal(signal.SIGINT)
        return what(*given, **named)

    return called


def trained(params: list[torch.nn.Parameter], optimizer: tidegate.AdamW, plain: Any, steps: range) -> bool:
    for step in steps:
        optimizer.zero_grad()
        grads = random_grads(params, step, some=False)
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
    return bool(plain.same_weights(params))


@pytest.mark.parametrize("how", ["load", "reset"])
def test_ctrl_c_while_a_state_is_replaced_comes_when_it_is_whole(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        assert trained(params, optimizer, plain, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        if how == "load":
            optimizer._reset_state(None)
        monkeypatch.setattr(optimizer.engine.memory, "arrays", interrupting(2, optimizer.engine.memory.arrays))
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(state) if how == "load" else optimizer._reset_state(None)
        if how == "reset":
            assert optimizer.steps == (0, 0)
            assert not optimizer.state_dict()["state"]
        else:
            assert trained(params, optimizer, plain, range(3, 6))


def test_a_state_that_was_loaded_by_half_is_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        assert trained(params, optimizer, plain, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        with monkeypatch.context() as patched:
            full = interrupting(2, optimizer.engine.memory.arrays, OSError(errno.ENOMEM, "Cannot allocate memory"))
            patched.setattr(optimizer.engine.memory, "arrays", full)
            with pytest.raises(OSError, match="Cannot allocate"):
                optimizer.load_state_dict(state)
        with pytest.raises(EngineError, match="loading its state failed: OSError"):
            trained(params, optimizer, plain, range(3, 4))
        optimizer.load_state_dict(state)
        assert trained(params, optimizer, plain, range(3, 6))


def test_ctrl_c_while_a_group_is_added_comes_when_it_is_there() -> None:
    params, added = params_of((400,)), params_of((300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        optimizer.step()
        optimizer.engine.extend = interrupting(1, optimizer.engine.extend)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            optimizer.add_param_group({"params": added})
        backward([*params, *added], random_grads([*params, *added], 1, some=False))
        optimizer.step()
        assert optimizer.steps == (2, 1)


def test_ctrl_c_while_it_closes_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of((400,))
    offload = tidegate.Offload(paths={"one": tmp_path}, host_cache=0, subgroup_numel=100)
    optimizer = tidegate.AdamW(params, offload=offload)
    backward(params, random_grads(params, 0, some=False))
    optimizer.step()
    monkeypatch.setattr(scratch, "_remove_tree", interrupting(1, scratch._remove_tree))
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert not list(tmp_path.iterdir())
    optimizer.close()


@pytest.mark.parametrize("where", ["commit", "update_began", "_refresh_state_entry", "began_at", "end_step"])
def test_what_cuts_the_end_of_a_step_short_makes_the_optimizer_unusable(where: str) -> None:
    params = params_of((400,), (300,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        grads = random_grads(params, 0, some=False)
        backward(params, grads)
        at: Any = {
            "commit": optimizer.engine.memory, "update_began": optimizer.engine.weights,
            "_refresh_state_entry": optimizer, "began_at": optimizer.phases, "end_step": optimizer._step_results,
        }[where]  # fmt: skip
        setattr(at, where, interrupting(1, getattr(at, where), SystemExit(5)))
        with pytest.raises(SystemExit):
            optimizer.step()
        with pytest.raises(EngineError, match="not usable: SystemExit: 5"):
            trained(params, optimizer, None, range(1))


class RaisesAtCall:
    """Raises at the n-th place in the agent's code at which Python lets a signal handler run: where a function begins,
    and where a call has returned."""

    def __init__(self, at: int) -> None:
        self._at, self.places = at, 0

    def __enter__(self) -> RaisesAtCall:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, given: Any) -> None:
        if frame.f_code.co_name == "<genexpr>":  # nobody hears of what is raised where one is dropped
            return
        module = frame.f_globals.get("__name__", "")
        if (
            event in ("call", "c_return")
            and module.startswith("tidegate.agent.")
            and module != DelayInterrupt.__module__
        ):
            self.places += 1
            if self.places == self._at:
                sys.setprofile(None)
                raise SystemExit(5)


@pytest.mark.slow
def test_wherever_a_handler_raises_in_a_step_the_step_is_whole_or_the_optimizer_is_unusable() -> None:
    def begun() -> tuple[list[torch.nn.Parameter], tidegate.AdamW, Any]:
        params = params_of((400,), (300,))
        optimizer = tidegate.AdamW(params, offload=MIXED)
        plain = plain_of(optimizer)
        assert trained(params, optimizer, plain, range(1))
        optimizer.zero_grad()
        backward(params, random_grads(params, 1, some=False))
        return params, optimizer, plain

    places = 0
    for _ in range(3):  # waits make more or fewer places
        _, optimizer, _ = begun()
        with optimizer, RaisesAtCall(-1) as counting:
            optimizer.step()
        places = max(places, counting.places)
    assert places > 100
    usable = set()
    for at in (*range(1, places - 20, 3), *range(places - 20, places + 1)):  # what is last is tried place by place
        params, optimizer, plain = begun()
        with optimizer:
            with suppress(SystemExit), RaisesAtCall(at):
                optimizer.step()
            if not optimizer.engine.usable:
                with pytest.raises(EngineError, match="not usable: SystemExit: 5"):
                    optimizer.step()
                continue
            usable.add(optimizer.num_steps)
            assert optimizer.steps == (optimizer.num_steps,) * 2, at
            if optimizer.num_steps == 1:  # not begun: it can be called again
                optimizer.step()
            plain.step(random_grads(params, 1, some=False))
            assert plain.same_weights(params), at
            assert optimizer.steps == (2, 2)
            assert trained(params, optimizer, plain, range(2, 4)), at
            assert optimizer.num_steps == 4
    assert usable == {1, 2}
