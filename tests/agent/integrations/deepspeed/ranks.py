"""One rank of a real torchrun job, for test_deepspeed: DeepSpeed's own ZeRO-3 offload beside ours, on its CPU
accelerator.

Two engines of the same model get the same batches. After each update ours must have DeepSpeed's weights and moments,
bit for bit; then it is given them, so that each update is judged alone.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import tidegate
from bench.storage.asynchronous import AsynchronousGradients
from tidegate.agent.devices.base import UpdateRun
from tidegate.agent.integrations.deepspeed import support as support
from tidegate.agent.integrations.deepspeed.vectors import vector_numel
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError
from tidegate.kernels import GradDtype, ThreadPool, WeightFormat, instruction_set, instruction_sets, use_instruction_set
from tidegate.kernels.deepspeed_adamw import IMPLEMENTATION, of_tail
from tidegate.kernels.deepspeed_adamw.scalars import scalars

STEPS = 30
LR = 1e-3
MOMENTS = ("exp_avg", "exp_avg_sq")
OFF: Mapping[str, Any] = {"stride": "off", "subgroup_numel": 700}


class Network(torch.nn.Module):
    """Sizes that two ranks do not divide, a recomputed layer, and one that the forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 33)
        self.second = torch.nn.Linear(33, 33)
        self.last = torch.nn.Linear(33, 3)
        self.unused = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(x))
        again = torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=False)
        loss: torch.Tensor = self.last(torch.nn.functional.gelu(again)).float().square().mean()
        return loss


def config_of(block: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    zero = {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 900,
        "stage3_param_persistence_threshold": 40, **changes.pop("zero", {}),
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 5}},
        **changes, **({"tidegate": {"cpu_threads": 1, **block}} if block is not None else {}),
    }  # fmt: skip


def engine_of(config: dict[str, Any], *, zero_init: bool = False, betas: Any = (0.8, 0.99)) -> Any:
    torch.manual_seed(0)
    if zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Network()
    else:
        model = Network()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if "weight" in name]},
        {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0, "betas": betas},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


@contextmanager
def both(block: Mapping[str, Any], **changes: Any) -> Iterator[tuple[Any, Any]]:
    """DeepSpeed's engine and ours."""
    making = {key: changes.pop(key) for key in ("zero_init", "betas") if key in changes}
    stock = engine_of(config_of(None, **changes), **making)
    ours = engine_of(config_of(block, **changes), **making)
    assert type(stock.optimizer) is DeepSpeedZeroOptimizer_Stage3
    try:
        yield stock, ours
    finally:
        stock.destroy()
        ours.destroy()


def train(engine: Any, step: int, scale: float = 1.0) -> None:
    """The backward passes of one step, and what else is between two."""
    for micro in range(engine.gradient_accumulation_steps()):
        made = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
        x = torch.randn(4, 13, generator=made).to(next(engine.module.parameters()).dtype)
        engine.backward(scale * engine(x))
        if micro + 1 < engine.gradient_accumulation_steps():
            engine.step()


def state_of(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[name, "fp32"] = safe_get_full_fp32_param(param).clone()
        for key in MOMENTS if engine.optimizer_steps else ():
            found[name, key] = safe_get_full_optimizer_state(param, key).clone()
    return found


def give(engine: Any, state: Mapping[tuple[str, str], torch.Tensor]) -> None:
    params = dict(engine.module.named_parameters())
    for (name, key), value in state.items():
        if key == "fp32":
            safe_set_full_fp32_param(params[name], value)
        else:
            safe_set_full_optimizer_state(params[name], value, key)


def ulps(one: torch.Tensor, other: torch.Tensor, *scales: torch.Tensor) -> float:
    """The greatest distance, in units in the last place of the largest number that is involved."""
    largest = torch.stack([t.float().abs().expand_as(one) for t in (one, other, *scales)]).amax(0)
    unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
    return float(((one.double() - other.double()).abs() / unit.double()).max())


def worst_of_updates(stock: Any, ours: Any, steps: int = STEPS, *, grads: bool = True, scale: float = 1.0) -> float:
    """In ulp of the largest of old and new weight and the learning rate, which is what an update is made of; 0 where
    moments, too, are equal bit for bit."""
    stock.optimizer_steps = ours.optimizer_steps = 0
    worst, lr = 0.0, torch.tensor(LR)
    for step in range(steps):
        before, scale_before = state_of(stock), stock.optimizer.loss_scale
        for engine in (stock, ours):
            train(engine, step, scale)
        if grads and step % 7 == 3:
            same_gradients(stock, ours)
        for engine in (stock, ours):
            engine.step()
        assert stock.optimizer.overflow == ours.optimizer.overflow
        assert stock.optimizer.loss_scale == ours.optimizer.loss_scale
        assert stock.get_lr() == ours.get_lr()
        if ours.optimizer.overflow:
            assert all(torch.equal(value, before[key]) for key, value in state_of(ours).items() if key in before)
            continue
        stock.optimizer_steps = ours.optimizer_steps = 1
        if stock.optimizer.loss_scale != scale_before:
            # DeepSpeed divides these gradients by the scale of the next step, which is twice as large.
            give(ours, state_of(stock))
            continue
        assert float(ours.get_global_grad_norm()) == pytest.approx(float(stock.get_global_grad_norm()), rel=1e-5), step
        theirs, mine = state_of(stock), state_of(ours)
        for (name, key), value in theirs.items():
            if key == "fp32" and not name.startswith("unused"):
                worst = max(worst, ulps(value, mine[name, key], before[name, key], lr))
            elif not name.startswith("unused") and not torch.equal(mine[name, key], value):
                torch.testing.assert_close(mine[name, key], value, rtol=1e-5, atol=1e-6 * float(value.abs().max()))
                worst = max(worst, 1.0)
        give(ours, theirs)
        assert all(torch.equal(value, theirs[key]) for key, value in state_of(ours).items())
    return worst


def same_gradients(stock: Any, ours: Any) -> None:
    """Read, changed and read back, whole and this rank's part, in both."""
    pairs = zip(stock.module.named_parameters(), ours.module.parameters(), strict=True)
    for (name, theirs), mine in pairs:
        if name.startswith("unused"):
            continue
        gradient = safe_get_full_grad(theirs)
        assert torch.equal(safe_get_full_grad(mine), gradient), name
        assert torch.equal(safe_get_local_grad(mine), safe_get_local_grad(theirs)), name
        if theirs.ds_numel % dist.get_world_size() == 0:  # DeepSpeed's own cannot set what it has padded
            for param in (theirs, mine):
                safe_set_full_grad(param, 0.5 * gradient)
                safe_set_local_grad(param, 0.5 * safe_get_local_grad(param))
            assert torch.equal(safe_get_full_grad(mine), 0.25 * gradient), name


# ---- what test_deepspeed asks for


def plans(folder: Path) -> dict[str, dict[str, Any]]:
    paths = {name: str(folder / f"{name}-{dist.get_rank()}") for name in ("one", "two")}
    for path in paths.values():
        Path(path).mkdir(exist_ok=True)
    return {
        "all CPU": {**OFF},
        "stride 2": {"stride": 2, "subgroup_numel": 700},
        "static 0.25": {"stride": "off", "static_ratio": 0.25, "subgroup_numel": 400},
        "two paths": {"stride": 2, "subgroup_numel": 400, "paths": paths, "host_cache": 0, "tier_split": "one:2,two:1"},
    }


STRIDE: Mapping[str, Any] = {"stride": 2, "subgroup_numel": 700}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 4, "hysteresis": 1}}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "equal betas": {"betas": (0.9, 0.999)},
    "clipping, accumulation": {"gradient_clipping": 0.01, "gradient_accumulation_steps": 3},
    "bf16": {**BF16, "zero_init": True, "gradient_clipping": 0.05},
    "bf16, fp32 sums": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2},
    "parameters offloaded": {"zero": {"offload_param": {"device": "cpu"}}},
    "Adam": {"optimizer": {"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1, "adam_w_mode": False}}},
    "fp16": FP16,
}


def worst_of_plan(name: str, folder: Path, steps: int = STEPS) -> float:
    with both(plans(folder)[name]) as (stock, ours):
        return worst_of_updates(stock, ours, steps)


def worst_of_way(name: str) -> float:
    with both(STRIDE, **WAYS[name]) as (stock, ours):
        if name != "fp16":
            return worst_of_updates(stock, ours, 6)
        # Only rank 0 has gradients that are too large: every rank must skip.
        worst = worst_of_updates(stock, ours, 12, scale=30.0 if dist.get_rank() == 0 else 1.0)
        assert ours.skipped_steps == stock.skipped_steps > 0
        return worst


def updates(folder: Path) -> dict[str, float]:
    """The worst of 30 updates for each plan, and of some for each way to train."""
    worst = {name: worst_of_plan(name, folder) for name in plans(folder)}
    if dist.get_world_size() > 1:
        worst |= {name: worst_of_way(name) for name in WAYS}
    return worst


def free_running(folder: Path) -> None:
    """Nothing is put right between steps, and losses, weights and moments are DeepSpeed's, bit for bit."""
    for name, changes in (("all CPU", {}), ("two paths", {"gradient_clipping": 0.01})):
        with both(plans(folder)[name], **changes) as (stock, ours):
            stock.optimizer_steps = ours.optimizer_steps = 1
            for step in range(STEPS):
                for engine in (stock, ours):
                    train(engine, step)
                    engine.step()
            theirs, mine = state_of(stock), state_of(ours)
            assert [key for key, value in theirs.items() if not torch.equal(value, mine[key])] == [], name


def cpu_adam_itself(folder: Path) -> None:
    """DeepSpeed's op and our kernel on the same arrays of every length: the same bits, step after step."""
    theirs = CPUAdamBuilder().load()
    vector, widest = vector_numel(theirs), instruction_set()
    kinds = list(itertools.product((True, False), (0.0, 0.1), instruction_sets()))
    with ThreadPool(2) as pool:
        for numel, (decoupled, decay, isa) in itertools.product((*range(1, 50), 127, 8197), kinds):
            use_instruction_set(isa)
            made = torch.Generator().manual_seed(numel)
            ours = [torch.randn(numel, generator=made), torch.zeros(numel), torch.zeros(numel)]
            stock, body = [array.clone() for array in ours], numel - numel % vector
            theirs.create_adam(1, LR, 0.9, 0.999, 1e-8, decay, decoupled, False)
            for step in range(1, 6):
                grad = torch.randn(numel, generator=made) * 10.0 ** -(3 * step)
                weight, *moments = stock
                theirs.adam_update(1, step, LR, 0.9, 0.999, 1e-8, decay, True, weight, grad, *moments)
                values = scalars(LR, (0.9, 0.999), 1e-8, decay, step, decoupled)
                for part, chosen in ((slice(body), values), (slice(body, None), of_tail(values))):
                    address, *tensors, last = (array[part].data_ptr() for array in (*ours, grad))
                    UpdateRun(
                        len(grad[part]), address, WeightFormat.F32, 0, tuple(tensors), last, GradDtype.F32, chosen,
                        IMPLEMENTATION,
                    ).apply(pool)  # fmt: skip
            assert all(map(torch.equal, ours, stock)), (numel, decoupled, decay, isa)
    theirs.destroy_adam(1)
    use_instruction_set(widest)


def released_gradients(folder: Path) -> None:
    """Weights are the same, bit for bit, whoever keeps gradients, and wherever micro-batches are summed."""
    results = []
    for more in ({}, {"gradients": "release"}, {"gradients": "release", "accumulation": "host"}):
        engine = engine_of(config_of({"stride": 2, "subgroup_numel": 700, **more}, gradient_accumulation_steps=2))
        for step in range(4):
            train(engine, step)
            if more:
                with pytest.raises(ConfigError, match="keep"):
                    safe_get_full_grad(engine.module.first.weight)
            engine.step()
        engine.optimizer_steps = 1
        results.append(state_of(engine))
        engine.destroy()
    assert all(torch.equal(value, result[key]) for result in results[1:] for key, value in results[0].items())


def local_state(folder: Path) -> None:
    """What this rank has of weights and moments can be read and set."""
    engine = engine_of(config_of(plans(folder)["two paths"], **BF16))
    train(engine, 0)
    engine.step()
    for param in engine.module.parameters():
        values = torch.rand_like(safe_get_local_fp32_param(param)) + 0.1
        safe_set_local_fp32_param(param, values)
        for i, key in enumerate(MOMENTS):
            safe_set_local_optimizer_state(param, values * (i + 2), key)
        assert torch.equal(safe_get_local_fp32_param(param), values)
        assert torch.equal(safe_get_local_optimizer_state(param, "exp_avg_sq"), values * 3)
        with pytest.raises(ConfigError, match="exp_avg_sq"):
            safe_get_local_optimizer_state(param, "max_exp_avg_sq")
    engine.destroy()


def norms_of_gradients(folder: Path) -> None:
    """DeepSpeed's norms of gradient groups are those of the gradients that are there, set ones included. Its setting
    for storage makes the folder."""
    nvme = {"device": "nvme", "nvme_path": str(folder / "made" / "by-us")}
    with both({"stride": 2, "subgroup_numel": 700}) as (stock, ours):
        for engine in (stock, ours):
            train(engine, 0)
            safe_set_local_grad(engine.module.first.weight, torch.full((13 * 33,), 0.25))
        wanted, found = (torch.stack(engine.optimizer._get_norm_groups()) for engine in (stock, ours))
        torch.testing.assert_close(found, wanted)
        assert found.min() > 0
    engine = engine_of(config_of({}, zero={"offload_optimizer": nvme}))
    assert any((folder / "made" / "by-us").iterdir())
    engine.destroy()


def asynchronous_copies(folder: Path) -> None:
    """DeepSpeed with gradients copied as our baseline does it has DeepSpeed's weights, bit for bit."""
    for ways in ({}, BF16):
        ends = []
        for changed in (False, True):
            engine = engine_of(config_of(None, gradient_clipping=0.05, **ways))
            if changed:
                AsynchronousGradients(engine.optimizer)
            for step in range(4):
                train(engine, step)
                engine.step()
            engine.optimizer_steps = 1
            ends.append(state_of(engine))
            engine.destroy()
        assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())


def refused(folder: Path) -> None:
    """What cannot work is said when the engine is made; where the block allows it, DeepSpeed goes on alone."""

    def made(block: Mapping[str, Any], optimizer: Any = None, **changes: Any) -> Any:
        model = Network()
        chosen = {} if optimizer is None else {"optimizer": optimizer(model.parameters(), lr=LR)}
        return deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config_of(block, **changes), **chosen
        )[0]

    untested = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    with pytest.raises(ConfigError, match="stage is 2"):
        made({}, zero={"stage": 2})
    with pytest.raises(ConfigError, match=r'offload_param.device is "nvme"'):
        made({}, zero={"offload_param": {"device": "nvme", "nvme_path": str(folder)}})
    with pytest.raises(ConfigError, match=r"torch\.optim\.sgd\.SGD"):
        made({}, torch.optim.SGD, **untested)
    engine = made({"fallback": True}, torch.optim.SGD, **untested)
    assert type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3
    engine.destroy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "TESTED_DIGESTS", {"step": frozenset({"other"}), "gone": frozenset({"other"})})
        with pytest.raises(ConfigError, match=r"(?s)step has another body.*has no gone.*tested are"):
            made({})
        engine = made({"fallback": True})
    assert type(engine.optimizer) is DeepSpeedZeroOptimizer_Stage3
    engine.destroy()


def closed(enabled: tidegate.DeepSpeedIntegration) -> None:
    """After the last handle is closed DeepSpeed is as it was, and engines that were built before go on exactly."""
    with both(STRIDE) as (stock, ours):
        with tidegate.enable_deepspeed():
            for _ in range(2):
                enabled.close()
            assert hasattr(DeepSpeedEngine._configure_optimizer, "_tidegate"), "another handle is open"
        assert not hasattr(DeepSpeedEngine._configure_optimizer, "_tidegate")
        assert worst_of_updates(stock, ours, 3) == 0.0
        assert type(optimizer_of(STRIDE)) is DeepSpeedZeroOptimizer_Stage3
    with tidegate.enable_deepspeed():
        within = DeepSpeedEngine._configure_optimizer
        around = functools.wraps(within)(lambda *args, **given: within(*args, **given))
        DeepSpeedEngine._configure_optimizer = around
    assert DeepSpeedEngine._configure_optimizer is around, "what another library has put there stays"
    assert type(optimizer_of(STRIDE)) is DeepSpeedZeroOptimizer_Stage3
    with tidegate.enable_deepspeed():
        assert type(optimizer_of(STRIDE)) is not DeepSpeedZeroOptimizer_Stage3
    DeepSpeedEngine._configure_optimizer = within
    tidegate.enable_deepspeed().close()
    assert not hasattr(DeepSpeedEngine._configure_optimizer, "_tidegate")


def optimizer_of(block: Mapping[str, Any]) -> Any:
    """The optimizer of an engine that is built and destroyed."""
    engine = engine_of(config_of(block))
    optimizer = engine.optimizer
    engine.destroy()
    return optimizer


SAVED = {**BF16, "gradient_clipping": 0.05}


def save(folder: Path) -> None:
    """Saves after 3 steps and once more when 3 further ones are done, which the resumed run must equal; then dies."""
    engine = engine_of(config_of(plans(folder)["two paths"], **SAVED))
    for step in range(6):
        train(engine, step)
        engine.step()
        if step % 3 == 2:
            client = {UNIVERSAL_CHECKPOINT_INFO: {}}
            engine.save_checkpoint(str(folder / "checkpoints"), tag=f"step-{step + 1}", client_state=client)
    (folder / f"saved-{dist.get_rank()}").touch()
    dist.barrier()  # torchrun kills the others as soon as it sees one dead
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder: Path) -> None:
    """Goes on where the killed run was, under another plan and in DeepSpeed's own optimizer; and back from there."""
    checkpoints = str(folder / "checkpoints")
    ends = {}
    for name, block in {"tidegate": plans(folder)["stride 2"], "stock": None}.items():
        engine = engine_of(config_of(block, **SAVED))
        assert engine.load_checkpoint(checkpoints, tag="step-3")[0] is not None
        for step in range(3, 6):
            train(engine, step)
            engine.step()
        engine.optimizer_steps = 1
        ends[name] = state_of(engine)
        if name == "stock":
            engine.save_checkpoint(checkpoints, tag="stock")
        engine.destroy()
    wanted = engine_of(config_of({**OFF}, **SAVED))
    wanted.optimizer_steps = 1
    wanted.load_checkpoint(checkpoints, tag="step-6")
    assert all(torch.equal(value, ends["tidegate"][key]) for key, value in state_of(wanted).items())
    for key, value in ends["stock"].items():
        if not key[0].startswith("unused"):
            torch.testing.assert_close(value, ends["tidegate"][key], rtol=1e-4, atol=1e-6)
    whole = get_fp32_state_dict_from_zero_checkpoint(checkpoints, tag="step-6")
    for name, value in whole.items():
        assert torch.equal(value, state_of(wanted)[name, "fp32"]), name
    if dist.get_world_size() > 1:
        universal(folder, state_of(wanted))
    wanted.load_checkpoint(checkpoints, tag="stock")
    assert all(torch.equal(value, ends["stock"][key]) for key, value in state_of(wanted).items())
    assert set(wanted.optimizer.tidegate.steps) == {6}
    wanted.load_checkpoint(checkpoints, tag="step-6", load_optimizer_states=False)
    wanted.destroy()
    other = engine_of(config_of({**OFF}, zero={"sub_group_size": 300}, **SAVED))
    with pytest.raises(ConfigError, match="sub_group_size"):
        other.load_checkpoint(checkpoints, tag="step-6")
    other.destroy()


def universal(folder: Path, saved: Mapping[tuple[str, str], torch.Tensor]) -> None:
    """Makes a universal checkpoint, which another number of ranks is to load, and loads it here."""
    name = "step-6_universal"
    if dist.get_rank() == 0:
        torch.save(dict(saved), folder / "universal.pt")
        convert_to_universal(SimpleNamespace(
            input_folder=str(folder / "checkpoints" / "step-6"), output_folder=str(folder / "checkpoints" / name),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        ))  # fmt: skip
    dist.barrier()
    reload_universal(folder)


def reload_universal(folder: Path) -> None:
    """State is what was saved, and training goes on."""
    engine = engine_of(config_of({"stride": 2, "subgroup_numel": 700}, checkpoint={"load_universal": True}, **SAVED))
    assert engine.load_checkpoint(str(folder / "checkpoints"), tag="step-6_universal")[0] is not None
    engine.optimizer_steps = 1
    saved, found = torch.load(folder / "universal.pt"), state_of(engine)
    assert all(torch.equal(value, found[key]) for key, value in saved.items())
    assert set(engine.optimizer.tidegate.steps) == {6}
    train(engine, 6)
    engine.step()
    assert set(engine.optimizer.tidegate.steps) == {7}
    engine.destroy()


def knobs_over_rest(folder: Path) -> None:
    """A change of knobs reaches all ranks before the same step, and each update stays DeepSpeed's."""
    url, run = os.environ["TIDEGATE_URL"], f"deepspeed-{dist.get_world_size()}"
    with both({"run": run, "daemon": url, **OFF}) as (stock, ours):
        inside = ours.optimizer.tidegate
        assert worst_of_updates(stock, ours, 3) == 0.0
        deadline = time.monotonic() + 60
        if dist.get_rank() == 0:
            with DaemonClient(url, os.environ["TIDEGATE_OPERATE"]) as client:
                client.set_knobs(run, {"stride": 2.0, "static_ratio": 0.25}, wait=0)
        done = torch.zeros(1)
        while not done.item():
            assert worst_of_updates(stock, ours, 1) == 0.0
            done = torch.tensor([float(inside.effective_knobs()["stride"] == 2.0 or time.monotonic() > deadline)])
            dist.all_reduce(done, dist.ReduceOp.MIN)
        assert inside.effective_knobs()["static_ratio"] == 0.25
        assert worst_of_updates(stock, ours, 3) == 0.0
        applied: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(applied, inside.attachment.applied_at)  # type: ignore[union-attr]
        assert all(one == applied[0] for one in applied)
        assert len(applied[0]) == 2


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    # DeepSpeed refuses fp16 on CPUs without instructions for it; torch does it there, only slowly.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    enabled = tidegate.enable_deepspeed()
    if what == "few":
        worst = {name: worst_of_plan(name, folder, steps=5) for name in ("static 0.25", "two paths")}
        closed(enabled)
        (folder / f"worst-{dist.get_rank()}.json").write_text(json.dumps(worst))
        return
    if what == "universal":
        reload_universal(folder)
        (folder / f"universal-{dist.get_rank()}").touch()
        return
    if what == "train":
        worst = updates(folder)
        free_running(folder)
        if dist.get_world_size() == 1:
            cpu_adam_itself(folder)
            released_gradients(folder)
            local_state(folder)
            norms_of_gradients(folder)
            asynchronous_copies(folder)
            refused(folder)
        knobs_over_rest(folder)
        (folder / f"worst-{dist.get_rank()}.json").write_text(json.dumps(worst))
        save(folder)
    resume(folder)
    (folder / f"resumed-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
