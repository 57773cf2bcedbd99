"""The model is moved or converted after the optimizer was built: before the first step all is built anew, then refused.

There is no GPU: a parameter that says it is on one stands for one that was moved there, over the fake CUDA runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.devices.fake_cuda import FakeCuda
from tests.agent.devices.vector_clocks import RaceError
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tidegate.agent.devices import selection
from tidegate.agent.devices.cuda import CudaDevice
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.errors import MemoryBudgetError, ParameterError
from tidegate.knobs.knobs import Knobs

RELEASING = tidegate.Offload(stride=2.0, subgroup_numel=50, emulated=FAST, gradients="release")
SHAPES = ((40, 3), (77,))
CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


class Placed(torch.nn.Parameter):
    """On the CPU, whatever it says."""

    place = CPU

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


class AtOnce(FakeCuda):
    """Does everything at once: whether the engine orders what it does is asked elsewhere."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__(eagerness=1.0, memory_bytes=memory_bytes)

    def _fail(self, error: RaceError) -> None:
        return


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs that were asked for."""
    found: list[torch.device] = []

    def runtime(device: torch.device, **_: object) -> FakeCuda:
        found.append(device)
        return AtOnce()

    monkeypatch.setattr(selection, "TorchCuda", runtime)
    return found


def placed_params(dtype: torch.dtype = torch.float32) -> list[Any]:
    return [Placed(p.detach()) for p in params_of(*SHAPES, dtype=dtype)]


def move(params: list[Any], place: torch.device = GPU) -> None:
    """As `model.to(place)`: the same parameters, with other data."""
    for param in params:
        param.data = param.data.clone()
        param.place = place
        if param.grad is not None:
            param.grad = param.grad.clone()


def convert(params: list[Any], dtype: torch.dtype) -> None:
    """As `model.to(dtype)`."""
    for param in params:
        param.data = param.data.to(dtype)
        if param.grad is not None:
            param.grad.data = param.grad.data.to(dtype)


def plain_of(optimizer: tidegate.AdamW) -> PlainAdamW:
    return PlainAdamW([dict(group) for group in optimizer.param_groups])


def train_exactly(
    optimizer: tidegate.AdamW, params: list[Any], plain: PlainAdamW, steps: int = 3, first: int = 0
) -> None:
    for step in range(first, first + steps):
        grads = random_grads(params, step, some=False)
        optimizer.zero_grad()
        backward(params, grads)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)


# ---- before the first step


def test_a_model_that_went_to_the_gpu_before_the_first_step_is_updated_there(gpus: list[torch.device]) -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        assert isinstance(optimizer.device, EmulatedDevice)
        move(params)
        train_exactly(optimizer, params, plain_of(optimizer))
        assert isinstance(optimizer.device, CudaDevice)
        assert optimizer.engine.device is optimizer.device
    assert gpus == [GPU]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_was_converted_before_the_first_step(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))
    with tidegate.AdamW(model.parameters(), offload=MIXED) as optimizer:
        model.to(dtype)
        params = list(model.parameters())
        train_exactly(optimizer, params, plain_of(optimizer))
        assert params[0].dtype == dtype


def test_gradients_released_on_the_gpu_after_a_move() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=RELEASING) as optimizer:
        convert(params, torch.bfloat16)
        train_exactly(optimizer, params, plain_of(optimizer))


def test_gradients_of_a_backward_that_ran_before_the_move() -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain, first, second = plain_of(optimizer), *(random_grads(params, i, some=False) for i in range(2))
        backward(params, first)
        move(params)
        backward(params, second)
        sums = [p.grad.clone() for p in params]
        assert optimizer.device.kind == "cuda", "the second backward must not come to the old device"
        optimizer.step()
        plain.step(sums)
        assert plain.same_weights(params)
        move(params)  # the same place: other memory there is no move
        train_exactly(optimizer, params, plain, first=5)


def test_a_step_without_another_backward_after_the_move() -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain, grads = plain_of(optimizer), random_grads(params, 0, some=False)
        backward(params, grads)
        move(params)
        optimizer.step()
        plain.step(grads)
        assert plain.same_weights(params)
        assert optimizer.device.kind == "cuda"


def test_inside_accumulate_it_goes_on_accumulating() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=RELEASING) as optimizer:
        convert(params, torch.bfloat16)
        plain, first, second = plain_of(optimizer), *(random_grads(params, i, some=False) for i in range(2))
        with optimizer.accumulate():
            backward(params, first)
        sums = [p.grad.clone() + g for p, g in zip(params, second, strict=True)]  # type: ignore[union-attr]
        backward(params, second)
        optimizer.step()
        plain.step(sums)
        assert plain.same_weights(params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_that_was_loaded_goes_along(dtype: torch.dtype) -> None:
    params = placed_params(dtype)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        train_exactly(optimizer, params, plain)
        state = optimizer.state_dict()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.load_state_dict(state)
        move(params)
        train_exactly(optimizer, params, plain, first=3)
        assert optimizer.device.kind == "cuda"


def test_a_state_keeps_its_moments_when_the_model_is_converted() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        train_exactly(optimizer, params, plain)
        state = optimizer.state_dict()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.load_state_dict(state)
        convert(params, torch.bfloat16)
        again = optimizer.state_dict()["state"]
        for index, values in state["state"].items():
            assert torch.equal(again[index]["exp_avg"], values["exp_avg"])
            assert again[index]["step"] == 3
            assert not again[index]["remainder"].any(), "of the fp32 weight, which is no more"


def test_weights_that_were_edited_and_moved_have_no_remainders_of_others() -> None:
    params = placed_params(torch.bfloat16)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 3)
        state = optimizer.state_dict()
    assert all(values["remainder"].any() for values in state["state"].values())
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.load_state_dict(state)
        params[0].data.copy_(torch.ones_like(params[0]))
        move(params)
        again = optimizer.state_dict()["state"]
        assert not again[0]["remainder"].any()
        assert torch.equal(again[1]["remainder"], state["state"][1]["remainder"])


def test_knobs_that_were_set_stay() -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.apply_knobs(Knobs(stride="off", static_ratio=1.0))
        move(params)
        train_exactly(optimizer, params, plain_of(optimizer))
        assert optimizer.effective_knobs() == {"stride": "off", "static_ratio": 1.0}
        assert set(optimizer.engine.memory.residence) == {"device"}


def test_param_groups_that_were_added_before_or_after_the_move() -> None:
    params = placed_params()
    with tidegate.AdamW(params[:1], offload=MIXED) as optimizer:
        move(params)
        optimizer.add_param_group({"params": params[1:], "lr": 0.5})
        assert optimizer.device.kind == "cuda"
        train_exactly(optimizer, params, plain_of(optimizer))


def test_files_on_storage_paths_are_made_anew(tmp_path: Path) -> None:
    params = placed_params()
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        move(params)
        train_exactly(optimizer, params, plain_of(optimizer))
        assert set(optimizer.engine.memory.residence) == {"disk"}
    assert not [one for one in tmp_path.rglob("*") if one.is_file() and one.stat().st_size > 4096]


def test_a_loaded_state_on_storage_paths_does_not_go_along(tmp_path: Path) -> None:
    params = placed_params()
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 1)
        state = optimizer.state_dict()
    with tidegate.AdamW(params, offload=offload) as optimizer:
        optimizer.load_state_dict(state)
        move(params)
        with pytest.raises(ParameterError, match=r"state .* storage paths.*Load .* after the last change"):
            optimizer.state_dict()


def test_other_parameters_in_the_groups_are_taken_as_fsdp_puts_them_there() -> None:
    """Accelerate puts the shards that FSDP2 makes into the groups, in place of the parameters."""
    old, new = params_of(*SHAPES), params_of((20, 3), (38,))
    with tidegate.AdamW(old, offload=MIXED) as optimizer:
        optimizer.param_groups[0]["params"] = list(new)
        plain = plain_of(optimizer)
        train_exactly(optimizer, new, plain)
        tidegate.AdamW(old, offload=MIXED).close()
        train_exactly(optimizer, new, plain, first=3)


def test_figures_of_an_attached_run_are_of_the_new_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tidegate.agent.telemetry.rank_metrics._sampler", lambda *_: None)
    params = placed_params()
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, paths={"disk": tmp_path}, host_cache=0)
    with tidegate.AdamW(params, offload=offload) as optimizer, tidegate.attach(optimizer, run="moved") as attachment:
        before = attachment.metrics_address
        move(params)
        train_exactly(optimizer, params, plain_of(optimizer))
        assert attachment.metrics_address == before
        assert attachment.recorder.totals.steps == 3
        report = attachment.recorder.totals.last
        assert report is not None
        assert report.path_states[0].bytes["write"] > 0


def test_a_model_that_is_moved_before_it_is_attached() -> None:
    model = torch.nn.Linear(30, 4)
    with tidegate.AdamW(model.parameters(), offload=MIXED) as optimizer:
        model.to(torch.bfloat16)
        with tidegate.attach(optimizer, model, run="moved"):
            assert optimizer.engine.subgroups[0].weight_bytes == 2


def test_nothing_is_built_anew_while_the_model_stays() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        engine = optimizer.engine
        with torch.no_grad():
            params[0].data = torch.ones_like(params[0])  # other memory, on the same device
        train_exactly(optimizer, params, plain_of(optimizer))
        assert optimizer.engine is engine


# ---- before the first step, where it cannot be right


def test_gradients_that_were_released_cannot_follow() -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=RELEASING) as optimizer:
        backward(params, random_grads(params, 0, some=False))
        for param in params:
            param.data, param.place = param.data.clone(), GPU
        with pytest.raises(ParameterError, match=r"moved .* after a backward.*released.*zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.place = CPU
        train_exactly(optimizer, params, plain_of(optimizer))


def test_a_model_that_was_moved_half_is_refused_and_can_be_moved_whole() -> None:
    params = placed_params()
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        move(params[:1])
        with pytest.raises(ParameterError, match="are on cpu, cuda:0: one optimizer works on one device"):
            backward(params, random_grads(params, 0, some=False))
        assert optimizer.device.kind == "emulated"
        move(params[1:])
        train_exactly(optimizer, params, plain_of(optimizer))


def test_a_dtype_that_cannot_be_offloaded_is_refused_and_can_be_taken_back() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        convert(params, torch.float64)
        with pytest.raises(ParameterError, match="float64"):
            backward(params, random_grads(params, 0, some=False))
        convert(params, torch.float32)
        train_exactly(optimizer, params, plain_of(optimizer))


def test_knobs_that_do_not_fit_the_new_device_are_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "TorchCuda", lambda *_, **__: AtOnce(memory_bytes=2000))
    params = placed_params()
    optimizer = tidegate.AdamW(params, offload=tidegate.Offload(static_ratio=1.0, stride="off", emulated=FAST))
    move(params)
    with pytest.raises(MemoryBudgetError, match="static_ratio=1 does not fit the device"):
        optimizer.state_dict()
    tidegate.AdamW(params, offload=tidegate.Offload(static_ratio=0.0, stride="off", num_slots=1)).close()


# ---- after it


def stepped(**settings: Any) -> Iterator[tuple[tidegate.AdamW, list[Any]]]:
    params = placed_params()
    named = [("layers.0.weight", params[0]), ("layers.0.bias", params[1])]
    with tidegate.AdamW(named if settings.pop("named", False) else params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        yield optimizer, params


@pytest.mark.parametrize(("named", "called"), [(True, "layers.0.weight"), (False, "0 of param group 0")])
def test_after_the_first_step_it_is_refused_with_both_devices(named: bool, called: str) -> None:
    for optimizer, params in stepped(named=named):
        move(params)
        says = rf"Parameter {called} was on cpu .* is on cuda:0 now.*[Mm]ove it back.*state_dict\(\)"
        with pytest.raises(ParameterError, match=says):
            backward(params, random_grads(params, 2, some=False))
        with pytest.raises(ParameterError, match=says):
            optimizer.step()
        move(params, CPU)
        optimizer.zero_grad()
        run_steps(optimizer, params, 2, 1)


def test_after_the_first_step_a_conversion_is_refused_with_both_dtypes() -> None:
    params = params_of(*SHAPES)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        convert(params, torch.bfloat16)
        with pytest.raises(ParameterError, match=r"Parameter 0 of param group 0 had dtype float32 .* bfloat16 now"):
            optimizer.step()


def test_the_second_backward_of_a_step_is_refused_too() -> None:
    for _, params in stepped():
        backward(params, random_grads(params, 2, some=False))
        move(params)
        with pytest.raises(ParameterError, match="is on cuda:0 now"):
            backward(params, random_grads(params, 3, some=False))


def test_after_the_first_step_other_parameters_in_the_groups_are_refused() -> None:
    for optimizer, _ in stepped():
        optimizer.param_groups[0]["params"] = params_of(*SHAPES)
        with pytest.raises(ParameterError, match=r"Parameter 0 of param group 0 is not the parameter"):
            optimizer.step()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
"""Weights of 16 bits are fp32 ones with a remainder or a master, which belongs to the state."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_remedy_that_is_named_works(dtype: torch.dtype) -> None:
    params = placed_params(dtype)
    optimizer = tidegate.AdamW(params, offload=MIXED)
    plain = plain_of(optimizer)
    train_exactly(optimizer, params, plain)
    before = optimizer.state_dict()
    move(params)
    state = optimizer.state_dict()
    for index, values in before["state"].items():
        assert all(torch.equal(state["state"][index][name], value) for name, value in values.items())
    optimizer.close()
    with tidegate.AdamW(params, offload=MIXED) as again:
        again.load_state_dict(state)
        train_exactly(again, params, plain, first=3)


@pytest.mark.parametrize("read_meanwhile", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_is_moved_back_trains_on(dtype: torch.dtype, read_meanwhile: bool) -> None:
    params = placed_params(dtype)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        train_exactly(optimizer, params, plain)
        move(params)
        if read_meanwhile:
            assert optimizer.state[params[0]]["exp_avg"].any()
        move(params, CPU)
        train_exactly(optimizer, params, plain, first=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_that_is_saved_after_the_move_is_whole(dtype: torch.dtype, tmp_path: Path) -> None:
    params = placed_params(dtype)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        train_exactly(optimizer, params, plain)
        move(params)
        optimizer.save_checkpoint(tmp_path)
    with tidegate.AdamW(params, offload=MIXED) as again:
        again.load_checkpoint(tmp_path)
        train_exactly(again, params, plain, first=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_that_is_edited_in_the_move_is_kept(dtype: torch.dtype) -> None:
    """Too few for the samples, and in other memory: a master that rounds to another weight is the weight's."""
    params = placed_params(dtype)
    with tidegate.AdamW(params, offload=MIXED, lr=0.0) as optimizer:
        run_steps(optimizer, params, 0, 2)
        edited = params[0].data.clone()
        edited[7, 1] = 5.0
        params[0].data = edited
        run_steps(optimizer, params, 2, 1)
        assert params[0][7, 1] == 5.0


def test_nothing_on_another_device_is_taken_for_memory_of_this_one() -> None:
    for optimizer, params in stepped():
        device = optimizer.device
        assert isinstance(device, EmulatedDevice)
        move(params)
        optimizer.state_dict()
        assert not any(device._adopted.holds(p.data_ptr(), 1) for p in params)
        move(params, CPU)
        optimizer.state_dict()
        assert all(device._adopted.holds(p.data_ptr(), 1) for p in params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", DTYPES)
def test_the_state_can_be_read_after_a_conversion_and_taken_to_the_converted_model(
    dtype: torch.dtype, to: torch.dtype
) -> None:
    """What made a 16-bit weight an fp32 one is lost, where the dtype is another."""
    params = params_of(*SHAPES, dtype=dtype)
    optimizer = tidegate.AdamW(params, offload=MIXED)
    plain = plain_of(optimizer)
    train_exactly(optimizer, params, plain)
    before = optimizer.state_dict()
    convert(params, to)
    state = optimizer.state_dict()
    for index, values in before["state"].items():
        assert all(torch.equal(state["state"][index][name], value) for name, value in values.items())
    optimizer.close()
    with tidegate.AdamW(params, offload=MIXED) as again:
        again.load_state_dict(state)
        taken = again.state_dict()["state"][0]
        assert torch.equal(taken["exp_avg"], before["state"][0]["exp_avg"])
        if to != dtype:
            assert not taken.get("remainder", torch.zeros(1)).any()
            assert torch.equal(taken.get("master", params[0]), params[0].float())
        else:
            train_exactly(again, params, plain, first=3)


def test_a_model_that_is_converted_there_and_back_keeps_what_it_can() -> None:
    params = params_of(*SHAPES, dtype=torch.bfloat16)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        train_exactly(optimizer, params, plain)
        convert(params, torch.float32)
        optimizer.state_dict()
        convert(params, torch.bfloat16)
        train_exactly(optimizer, params, plain, first=3)
