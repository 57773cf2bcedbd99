"""What users of torch.optim.AdamW do besides stepping: scaling, options, groups and parameters that come and go."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import tidegate
from tests.agent.engine.test_exactness import FAST, backward, random_grads
from tests.agent.optimizer.background import update_in_background
from tests.agent.optimizer.test_awkward_moments import grads_of, plain_of
from tests.agent.optimizer.test_optimizer import MIXED, params_of, run_steps
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import ConfigError, MemoryBudgetError, ParameterError
from tidegate.knobs.knobs import Knobs

# ---- loss scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_grad_scaler_hands_over_its_scale(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    params = params_of((40, 3), (77,), dtype=dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    with tidegate.AdamW(params, max_grad_norm=max_grad_norm, offload=MIXED) as optimizer:
        plain = PlainAdamW([dict(group) for group in optimizer.param_groups], max_grad_norm)
        for step in range(5):
            optimizer.zero_grad()
            scale = scaler.get_scale()
            grads = random_grads(params, step, some=False)
            if step == 2:
                grads[0][0] = float("inf")  # type: ignore[index]
            scaler.scale(torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()).backward()
            plain.step(grads_of(params), scale)
            scaler.step(optimizer)
            scaler.update()
            assert (scaler.get_scale() < scale) == (step == 2)
            assert plain.same_weights(params)
        assert optimizer.state_dict()["state"][0]["step"] == 4


@pytest.mark.parametrize("poisoned", [(0,), (1, 3), (0, 1, 2)], ids=["first", "some", "all"])
def test_skipped_steps_count_after_a_resume(poisoned: tuple[int, ...]) -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        for step in range(max(3, *poisoned)):
            optimizer.zero_grad()
            grads = random_grads(params, step, some=False)
            if step in poisoned:
                grads[0][0] = float("nan")  # type: ignore[index]
            backward(params, grads)
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        done, steps = optimizer.num_steps, optimizer.steps
    file.seek(0)
    saved = torch.load(file)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.load_state_dict(theirs.state_dict())
        assert (optimizer.num_steps, optimizer.steps) == (max(steps), steps)
        optimizer.load_state_dict(saved)
        assert (optimizer.num_steps, optimizer.steps) == (done, steps)
        again = optimizer.state_dict()
        assert again.keys() == saved.keys()
        run_steps(optimizer, params, 5, 1)
        assert optimizer.num_steps == done + 1
        optimizer.load_state_dict(again)
        assert optimizer.num_steps == done


def test_unscaled_gradients_are_taken_as_they_are() -> None:
    params = params_of((40, 3), (77,))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            terms = [(p * g).sum() for p, g in zip(params, random_grads(params, step, some=False), strict=True)]
            scaler.scale(torch.stack(terms).sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            plain.step(grads_of(params))
            scaler.step(optimizer)
            scaler.update()
            assert plain.same_weights(params)


def test_only_a_grad_scaler_is_told_that_its_scale_is_taken_over() -> None:
    """Lightning refuses to clip for whoever says so, without a scaler, too."""
    with tidegate.AdamW(params_of((4,)), offload=MIXED) as optimizer:
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_a_scaler_that_is_not_torchs_divides_the_gradients_itself() -> None:
    class Own(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                self.unscale_(optimizer)
            return super().step(optimizer, *args, **kwargs)

    params = params_of((40, 3), (77,))
    scaler = Own("cpu", init_scale=64.0)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            grads = random_grads(params, step, some=False)
            scaler.scale(torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()).backward()
            plain.step([None if g is None else g / 64.0 for g in grads_of(params)])
            scaler.step(optimizer)
            scaler.update()
            assert plain.same_weights(params)


def test_infinities_that_another_rank_found_skip_the_step() -> None:
    params = params_of((40, 3), (77,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        skipped: list[bool] = []
        optimizer.observers.append(lambda result, _: skipped.append(result.skipped))
        before = [p.detach().clone() for p in params]
        backward(params, random_grads(params, 0, some=False))
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert skipped == [True]
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_grad_scaler_is_refused_where_gradients_are_released() -> None:
    params = params_of((40, 3))
    scaler = torch.amp.GradScaler("cpu")
    offload = tidegate.Offload(subgroup_numel=50, emulated=FAST, gradients="release")
    with tidegate.AdamW(params, offload=offload) as optimizer:
        scaler.scale((params[0] * 2).sum()).backward()
        with pytest.raises(ParameterError, match="GradScaler need gradients='keep'"):
            scaler.unscale_(optimizer)
        with pytest.raises(ParameterError, match="GradScaler need gradients='keep'"):
            scaler.step(optimizer)


# ---- options and groups


def test_maximize_and_l2_per_group_changed_while_training() -> None:
    params = params_of((40, 3), (77,), (30,))
    groups = [
        {"params": params[:1], "maximize": True},
        {"params": params[1:2], "decoupled_weight_decay": False, "weight_decay": 0.3},
        {"params": params[2:], "lr": torch.tensor(0.02)},
    ]
    with tidegate.AdamW(groups, lr=0.01, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(4):
            optimizer.param_groups[0]["betas"] = (0.8 + 0.01 * step, 0.9)
            optimizer.param_groups[1]["lr"] = 0.01 * (step + 1)
            plain.groups = [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
            grads = random_grads(params, step, some=False)
            optimizer.zero_grad()
            backward(params, grads)
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"amsgrad": True}, "amsgrad=True"),
        ({"capturable": True}, "capturable=True"),
        ({"differentiable": True}, "differentiable=True"),
        ({"lr": torch.tensor([0.1, 0.2])}, "2 elements"),
        ({"momentum": 0.9}, "'momentum' is not an option"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tidegate.AdamW(params_of((3,)), **options)
    if "momentum" not in options:
        with pytest.raises(ConfigError, match=says):
            tidegate.AdamW([{"params": params_of((3,)), **options}])


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_cannot_work_are_named_where_they_are_set_later(option: str) -> None:
    params = params_of((40,), (30,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(2):
            grads = random_grads(params, step, some=False)
            backward(params, grads)
            optimizer.param_groups[0][option] = True
            with pytest.raises(ConfigError, match=f"{option}=True is not supported: .* or set it to False"):
                optimizer.step()
            assert optimizer.steps == (step, step)
            assert optimizer.num_steps == step
            optimizer.param_groups[0][option] = False
            optimizer.step()
            optimizer.zero_grad()
            plain.step(grads)
            assert plain.same_weights(params)


def test_options_of_torchs_implementations_are_accepted_and_kept_in_the_state() -> None:
    params = params_of((40, 3))
    with tidegate.AdamW(params, foreach=True, fused=False, amsgrad=False, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        torch_keys = set(torch.optim.AdamW(params).state_dict()["param_groups"][0])
        assert set(optimizer.state_dict()["param_groups"][0]) == torch_keys


def test_parameters_that_share_memory_are_refused_also_later() -> None:
    whole = torch.zeros(30)
    apart = [torch.nn.Parameter(whole[:10]), torch.nn.Parameter(whole[10:])]
    across = torch.nn.Parameter(whole[5:15])
    with pytest.raises(ParameterError, match="Parameters 0 and 1 share memory"):
        tidegate.AdamW([apart[0], across])
    with tidegate.AdamW(apart) as optimizer:  # nothing of it was claimed
        with pytest.raises(ParameterError, match="Parameters 0 and 2 share memory"):
            optimizer.add_param_group({"params": [across]})
        assert len(optimizer.param_groups) == 1
    with tidegate.AdamW([across]):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_default_device_of_the_script_changes_nothing(dtype: torch.dtype) -> None:
    """As torch.set_default_device("cuda") does; "meta" is one that every machine has."""
    params, others = params_of((300,), dtype=dtype), params_of((300,), dtype=dtype)
    for device, trained in (("meta", params), ("cpu", others)):
        with torch.device(device), tidegate.AdamW(trained, lr=0.1, offload=MIXED) as optimizer:
            for step in range(4):
                if step == 2:
                    optimizer.load_state_dict(optimizer.state_dict())
                    trained[0].data.mul_(1.5)
                trained[0].grad = torch.full((300,), 0.1 * step - 0.2, dtype=dtype, device="cpu")
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(params[0], others[0])


def test_one_tensor_and_repeated_parameters_are_refused() -> None:
    param = params_of((3,))[0]
    with pytest.raises(TypeError, match="iterable"):
        tidegate.AdamW(param)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="more than once"):
        tidegate.AdamW([{"params": [param, param]}])


# ---- parameters that come and go


@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_added_while_training(gradients: Any, dtype: torch.dtype) -> None:
    params, late = params_of((40, 3), (77,)), params_of((200,), (0,), (), dtype=dtype)
    offload = tidegate.Offload(stride=2.0, static_ratio=0.3, subgroup_numel=50, emulated=FAST, gradients=gradients)
    with tidegate.AdamW(params, lr=0.01, offload=offload) as optimizer:
        plain = plain_of(optimizer)
        everybody = list(params)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": late, "lr": 0.1})
                plain.add(dict(optimizer.param_groups[-1]))
                everybody += late
            grads = random_grads(everybody, step, some=False)
            optimizer.zero_grad()
            backward(everybody, grads)
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(everybody)
        assert optimizer.state_dict()["state"][2]["step"] == 4


def test_larger_subgroups_added_later_get_larger_slots() -> None:
    small, large = params_of((40,)), params_of((400,))
    with tidegate.AdamW(small, lr=0.1, offload=tidegate.Offload(stride=1.0, subgroup_numel=400, emulated=FAST)) as both:
        run_steps(both, small, 0, 1)
        both.add_param_group({"params": large})
        plain = plain_of(both)
        state = both.state_dict()["state"][0]
        plain.params[0].exp_avg[:], plain.params[0].exp_avg_sq[:] = state["exp_avg"], state["exp_avg_sq"]
        plain.params[0].step = 1
        both.zero_grad()
        grads = random_grads([*small, *large], 1, some=False)
        backward([*small, *large], grads)
        both.step()
        plain.step(grads)
        assert plain.same_weights([*small, *large])


def test_parameters_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    params = params_of((40, 3))
    offload = tidegate.Offload(stride=1.0, subgroup_numel=1000, device_memory_bytes=100_000, emulated=FAST)
    with tidegate.AdamW(params, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 1)
        for refused, error in (
            (params_of((100_000,)), MemoryBudgetError),
            ([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))], ParameterError),
        ):
            with pytest.raises(error):
                optimizer.add_param_group({"params": refused})
            assert len(optimizer.param_groups) == 1
        run_steps(optimizer, params, 1, 1)


def test_frozen_parameters_thaw_and_freeze_while_training() -> None:
    params = params_of((40, 3), (77,), (30,))
    params[1].requires_grad_(False)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        plain = plain_of(optimizer)
        for step in range(8):
            params[1].requires_grad_(step in (2, 3, 6))
            params[2].requires_grad_(step not in (3, 4))
            grads = random_grads(params, step, some=False)
            grads = [g if p.requires_grad else None for p, g in zip(params, grads, strict=True)]
            optimizer.zero_grad()
            backward([p for p in params if p.requires_grad], [g for g in grads if g is not None])
            optimizer.step()
            plain.step(grads)
            assert plain.same_weights(params)
        assert len(optimizer.engine.gradients._hooks) == 3


# ---- state


def test_state_is_loadable_with_weights_only_and_cheap_before_the_first_step() -> None:
    params = params_of((40, 3), (77,), dtype=torch.bfloat16)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        assert optimizer.state_dict()["state"] == {}
        run_steps(optimizer, params, 0, 2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        optimizer.load_state_dict(loaded)
        assert loaded["state"][1]["exp_avg"].shape == (77,)


def test_state_whose_groups_number_parameters_in_another_order() -> None:
    params = params_of((4,), (4,))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 2)
        state = optimizer.state_dict()
        renamed = {
            "state": {10: state["state"][1], 11: state["state"][0]},
            "param_groups": [{**state["param_groups"][0], "params": [11, 10]}],
        }
        optimizer.load_state_dict(renamed)
        for key in (0, 1):
            assert torch.equal(optimizer.state_dict()["state"][key]["exp_avg"], state["state"][key]["exp_avg"])


def test_a_state_of_adam_does_not_make_it_adam() -> None:
    params = params_of((4,))
    adam = torch.optim.Adam(params)
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        optimizer.load_state_dict(adam.state_dict())
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_hooks_of_state_dict_and_load_state_dict_see_the_state() -> None:
    params = params_of((40, 3))
    with tidegate.AdamW(params, offload=MIXED) as optimizer:
        run_steps(optimizer, params, 0, 1)
        seen: list[Any] = []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append(set(o.state[params[0]])))
        optimizer.register_state_dict_post_hook(lambda o, state: seen.append(set(state["state"][0])))
        state = optimizer.state_dict()
        assert seen == [{"step", "exp_avg", "exp_avg_sq"}] * 2
        optimizer.register_load_state_dict_pre_hook(
            lambda o, state: {**state, "state": {0: {**state["state"][0], "step": torch.tensor(41.0)}}}
        )
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state_dict()["state"][0]["step"]))
        optimizer.load_state_dict(state)
        assert seen[-1] == 41


# ---- two hundred steps of everything


def test_agrees_with_torch_over_two_hundred_steps_of_schedule_groups_accumulation_and_clipping() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(17, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    groups = [
        [{"params": model[0].parameters(), "weight_decay": 0.2}, {"params": model[2].parameters(), "lr": 1e-3}]
        for model in models
    ]
    offload = tidegate.Offload(stride=2.5, static_ratio=0.2, subgroup_numel=100, emulated=FAST)
    reference = torch.optim.AdamW(groups[1], lr=3e-3)
    with tidegate.AdamW(groups[0], lr=3e-3, offload=offload) as optimizer:
        pairs = list(zip(models, (optimizer, reference), strict=True))
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [3e-3, 1e-3], total_steps=200) for _, o in pairs]
        for step in range(200):
            for (model, used), schedule in zip(pairs, schedules, strict=True):
                used.zero_grad()
                for batch in range(1 + step % 3):
                    x = torch.randn(8, 17, generator=torch.Generator().manual_seed(10 * step + batch))
                    model(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                used.step()
                schedule.step()
            if step % 20 == 7:
                optimizer.apply_knobs(Knobs(stride=[1.0, 3.0, "off"][step % 3], static_ratio=0.1 * (step % 7)))
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-6)


def test_torchs_distributed_checkpoint_changes_nothing() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(8, 3)
    with tidegate.AdamW(model.parameters(), offload=MIXED) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer.state_dict()["state"]
        found = get_optimizer_state_dict(model, optimizer)["state"]["weight"]
        after = optimizer.state_dict()["state"]
        for name, value in before[0].items():
            assert torch.equal(after[0][name], value)
            assert torch.equal(found[name], value)  # type: ignore[index, call-overload]
        assert optimizer.state[model.weight]["step"] == 1


def test_a_schedule_that_changes_lr_in_place_does_not_reach_an_update_under_way() -> None:
    params = params_of((40, 3), (77,))
    offload = tidegate.Offload(stride=2.0, subgroup_numel=50, gradients="release")
    with tidegate.AdamW(params, lr=torch.tensor(0.1), offload=offload) as optimizer:
        plain = PlainAdamW([{**group, "lr": float(group["lr"])} for group in optimizer.param_groups])
        update_in_background(optimizer)
        grads = random_grads(params, 0, some=False)
        backward(params, grads)
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(100.0)
        optimizer.wait()
        plain.step(grads)
        assert plain.same_weights(params)


def test_an_edit_before_parameters_are_added_is_not_reverted() -> None:
    params = params_of((40, 3))
    offload = tidegate.Offload(stride="off", subgroup_numel=50, emulated=FAST)
    with tidegate.AdamW(params, lr=0.0, weight_decay=0.0, offload=offload) as optimizer:
        run_steps(optimizer, params, 0, 2)
        with torch.no_grad():
            params[0].zero_()
        optimizer.add_param_group({"params": params_of((7,))})
        run_steps(optimizer, params, 2, 1)
        assert not params[0].any()
