"""Sums of micro-batches in host memory: exact, off the device between backward passes, whole or dropped."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.enqueue_ahead import RunsAhead
from tests.agent.devices.fake_training import WatchedDevice, watched
from tests.agent.engine.test_exactness import FAST, backward, random_grads, with_special_values
from tests.agent.optimizer.test_awkward_moments import plain_of
from tests.agent.optimizer.test_optimizer import params_of
from tidegate.agent.gradients import accumulation
from tidegate.agent.gradients.accumulation import HostSums
from tidegate.errors import ConfigError, MemoryBudgetError, ParameterError
from tidegate.kernels import ThreadPool

Grads = list[torch.Tensor | None]


def offload(how: Any, **changes: Any) -> tidegate.Offload:
    settings: dict[str, Any] = {"stride": 2.0, "static_ratio": 0.2, "subgroup_numel": 50, "emulated": FAST, **changes}
    return tidegate.Offload(gradients="release", accumulation=how, **settings)


def batches(params: list[torch.nn.Parameter], step: int, count: int, some: bool = False) -> list[Grads]:
    return [with_special_values(random_grads(params, step + 31 * i, some), step + i) for i in range(count)]


def accumulate_all(optimizer: tidegate.AdamW, params: list[torch.nn.Parameter], grads: list[Grads]) -> None:
    for batch in grads[:-1]:
        with optimizer.accumulate():
            backward(params, batch)
    backward(params, grads[-1])


def summed(parts: list[torch.Tensor | None], how: str) -> torch.Tensor | None:
    """As torch adds into `.grad`, or in fp32 and rounded once."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if how == "host":
        return list(itertools.accumulate(there, torch.add))[-1]
    return list(itertools.accumulate([part.float() for part in there], torch.add))[-1].to(there[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["host", "host_fp32"])
@pytest.mark.parametrize("chunk", [20, 1 << 20])
def test_the_sum_is_exactly_what_is_stated(
    dtype: torch.dtype, how: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "CHUNK_BYTES", chunk)
    params = params_of((40, 3), (77,), (300,), (0,), dtype=dtype)
    with tidegate.AdamW(params, lr=0.1, offload=offload(how)) as optimizer:
        plain = plain_of(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            grads = batches(params, step, 1 + step, some=step % 2 == 1)
            accumulate_all(optimizer, params, grads)
            optimizer.step()
            plain.step([summed(list(parts), how) for parts in zip(*grads, strict=True)])
            assert plain.same_weights(params), step


@pytest.mark.parametrize("how", ["host", "host_fp32"])
def test_a_sum_of_one_gradient_is_that_gradient(how: str) -> None:
    """The sign of its zeros, too."""
    params = params_of((4,), dtype=torch.bfloat16)
    with tidegate.AdamW(params, offload=offload(how)) as optimizer:
        sums, grad = optimizer.engine.gradients.sums, torch.tensor([-0.0, 0.0, 1.5, -3.0], dtype=torch.bfloat16)
        assert sums is not None
        sums.add(0, grad)
        found = sums.take_to_device(0, params[0])
        assert found is not None
        assert torch.equal(found.float().view(torch.int32), grad.float().view(torch.int32))
        assert sums.take_to_device(0, params[0]) is None


def test_weights_of_other_strides_and_gradients_of_others() -> None:
    params = [torch.nn.Parameter(torch.randn(6, 5, 4).permute(2, 0, 1)), torch.nn.Parameter(torch.randn(30))]
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
        with tidegate.AdamW(theirs, offload=tidegate.Offload(subgroup_numel=50, emulated=FAST)) as kept:
            for step in range(3):
                grads = [[torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i)) for p in params]
                         for i in range(3)]  # fmt: skip
                accumulate_all(optimizer, params, grads)  # type: ignore[arg-type]
                accumulate_all(kept, theirs, grads)  # type: ignore[arg-type]
                for one in (optimizer, kept):
                    one.step()
                    one.zero_grad()
                assert all(map(torch.equal, params, theirs))


def test_between_two_backward_passes_the_device_has_no_gradients() -> None:
    params = params_of((5000,), (5000,), (5000,))
    with tidegate.AdamW(params, offload=offload("host", subgroup_numel=5000, stride="off")) as optimizer:
        before = optimizer.device.in_use_bytes
        with optimizer.accumulate():
            for step in range(3):
                backward(params, random_grads(params, step, some=False))
                assert [param.grad for param in params] == [None] * 3
        sums = optimizer.engine.gradients.sums
        assert sums is not None
        for param in sums.params():
            sums._last[param].result()
        sums._thread.submit(int).result()  # a result is there before its thread has let go of the gradient
        assert optimizer.device.in_use_bytes == before
        backward(params, random_grads(params, 3, some=False))
        optimizer.step()


def test_no_more_than_some_wait_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that adds stands still until the backward waits for it."""
    params = params_of(*[(100,)] * 12)
    stopped, begun = threading.Event(), []
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        sums = optimizer.engine.gradients.sums
        assert sums is not None
        add, result = sums._add, Future.result

        def held(*args: Any) -> None:
            assert stopped.wait(60)
            add(*args)

        def noted(self: Future[Any], timeout: float | None = None) -> Any:
            begun.append(len(sums._last))
            stopped.set()
            return result(self, timeout)

        monkeypatch.setattr(sums, "_add", held)
        monkeypatch.setattr(Future, "result", noted)
        with optimizer.accumulate():
            backward(params, random_grads(params, 0, some=False))
        stopped.set()
        assert begun == list(range(accumulation.MAX_WAITING + 1, 13))


def test_gradients_that_came_only_before_the_last_backward_count() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        plain = plain_of(optimizer)
        first = random_grads(params, 0, some=False)
        with optimizer.accumulate():
            backward(params, first)
        optimizer.step()
        plain.step(first)
        assert plain.same_weights(params)
        second = random_grads(params, 1, some=False)
        with optimizer.accumulate():
            backward(params, [None, second[1]])
        third = random_grads(params, 2, some=False)
        backward(params, [third[0], None])
        optimizer.step()
        plain.step([third[0], second[1]])
        assert plain.same_weights(params)


def test_state_is_saved_and_loaded_between_backward_passes_and_nothing_is_lost() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        plain = plain_of(optimizer)
        grads = batches(params, 0, 2)
        with optimizer.accumulate():
            backward(params, grads[0])
        assert optimizer.state_dict()["state"] == {}
        backward(params, grads[1])
        optimizer.step()
        plain.step([summed(list(parts), "host") for parts in zip(*grads, strict=True)])
        assert plain.same_weights(params)


def test_zero_grad_drops_the_sums() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        plain = plain_of(optimizer)
        with optimizer.accumulate():
            backward(params, random_grads(params, 7, some=False))
        optimizer.zero_grad()
        grads = random_grads(params, 8, some=False)
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)
        optimizer.step()
        assert optimizer.num_steps == 1


def test_a_micro_batch_after_the_last_backward_is_refused() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        with optimizer.accumulate(), pytest.raises((ParameterError, RuntimeError), match="released"):
            backward(params, random_grads(params, 1, some=False))


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="accumulation='disk' is unknown"):
        tidegate.Offload(gradients="release", accumulation="disk")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs gradients='release'"):
        tidegate.Offload(accumulation="host")
    monkeypatch.setattr(accumulation, "host_available_bytes", lambda: 1000)
    params = params_of((300,), dtype=torch.bfloat16)
    with pytest.raises(MemoryBudgetError, match="needs 33,555,632 bytes"):
        tidegate.AdamW(params, offload=offload("host_fp32"))
    monkeypatch.undo()
    tidegate.AdamW(params, offload=offload("host_fp32")).close()


def test_an_error_of_the_thread_reaches_training(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        sums = optimizer.engine.gradients.sums
        assert sums is not None

        def broken(*_: Any) -> None:
            raise ValueError("broken on purpose")

        monkeypatch.setattr(sums, "_add", broken)
        with optimizer.accumulate():
            backward(params, random_grads(params, 0, some=False))
        with pytest.raises(ValueError, match="on purpose"):
            backward(params, random_grads(params, 1, some=False))


def test_a_part_that_is_missing_is_never_left_out_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of((20,), dtype=torch.float32)
    params[0].requires_grad_(False)  # one that is trained has the memory of its sum from the beginning
    with tidegate.AdamW(params, offload=offload("host")) as optimizer:
        params[0].requires_grad_(True)
        optimizer.engine.gradients.watch_unfrozen()
        sums = optimizer.engine.gradients.sums
        assert sums is not None
        host_buffer = sums._device.host_buffer

        def full(nbytes: int) -> torch.Tensor:
            raise MemoryBudgetError("no memory", nbytes, 0)

        monkeypatch.setattr(sums._device, "host_buffer", full)
        with optimizer.accumulate():
            backward(params, [torch.ones(20)])
        with pytest.raises(MemoryBudgetError):
            sums._last[0].result()
        monkeypatch.setattr(sums._device, "host_buffer", host_buffer)
        with optimizer.accumulate():
            backward(params, [torch.ones(20)])
        with pytest.raises(MemoryBudgetError):
            backward(params, [torch.ones(20)])
        optimizer.zero_grad()


def test_a_sum_is_not_filled_anew_before_the_device_has_read_it() -> None:
    """The host begins fp32 sums itself: nothing on the device orders that after the copy of the sum before."""
    fake = RunsAhead()
    device, pool = WatchedDevice(fake), ThreadPool(1)
    sums = HostSums(device, pool, fp32=True)
    weight = torch.zeros(50, dtype=torch.bfloat16)
    grads = [torch.full((50,), float(value), dtype=torch.bfloat16) for value in (1, 2, 4, 8)]
    with watched(fake):
        taken = []
        for first, second in (grads[:2], grads[2:]):
            sums.add(0, first)
            sums.add(0, second)
            total = sums.take_to_device(0, weight)
            assert total is not None
            taken.append(total)
        device.now().wait()
        assert [set(total.tolist()) for total in taken] == [{3.0}, {12.0}]
        sums.close()
    pool.close()
    device.close()
