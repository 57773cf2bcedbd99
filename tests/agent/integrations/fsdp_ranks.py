"""One rank of a real torchrun job, for test_fsdp: trains under FSDP2 and holds gathered weights against the oracle's.

The layers have rows that no number of ranks divides, and one parameter has fewer elements than there are ranks.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tidegate
from tests.agent.plain_adamw import PlainAdamW
from tidegate.errors import ConfigError, ParameterError
from tidegate.knobs.knobs import Knobs

STEPS = 8
KNOBS = {2: Knobs(stride="off"), 4: Knobs(stride=1.0, static_ratio=0.3), 6: Knobs(stride=3.0)}


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 33), torch.nn.GELU(), torch.nn.Linear(33, 18), torch.nn.GELU(), torch.nn.Linear(18, 1)
    )


def divided(mesh: DeviceMesh, model: torch.nn.Sequential | None = None) -> torch.nn.Sequential:
    model = model or network()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def divided_twice(mesh: DeviceMesh) -> torch.nn.Sequential:
    """Tensor parallelism inside FSDP2, as torchtitan does: both divide the rows of the first layer's weight."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 32), torch.nn.GELU(), torch.nn.Linear(32, 6))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return divided(mesh["dp"], model)


def optimizer_of(model: torch.nn.Module, paths: Path | None = None, **settings: Any) -> tidegate.AdamW:
    offload = tidegate.Offload(
        device="emulated", stride=2.0, subgroup_numel=64, cpu_threads=1, gradients=settings.pop("gradients", "keep"),
        accumulation=settings.pop("accumulation", "device"),
        paths={name: paths / name for name in ("one", "two")} if paths is not None else {},
        host_cache="auto" if paths is None else 0,
    )  # fmt: skip
    return tidegate.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, offload=offload, **settings)


def whole(tensors: Any) -> list[torch.Tensor]:
    """Gathered, on every rank."""
    return [tensor.full_tensor().detach().clone() for tensor in tensors]


def backward(model: torch.nn.Module, step: int, scale: float = 1.0, part: int | None = None) -> None:
    """`part`: which part of the batch; each rank has its own, unless tensor parallelism has ranks work on the same."""
    part = dist.get_rank() if part is None else part
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + part))
    (scale * model(x).square().mean()).backward()


def equals_the_oracle(mesh: DeviceMesh, paths: Path | None) -> None:
    """Weights, and those of a twin that releases its gradients, whatever the knobs."""
    model, twin = divided(mesh), divided(mesh)
    plain_params = [torch.nn.Parameter(param) for param in whole(model.parameters())]
    plain = PlainAdamW([{"params": plain_params, "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}])
    with optimizer_of(model, paths) as optimizer, optimizer_of(twin, gradients="release") as releasing:
        early: list[int] = []
        for step in range(STEPS):
            for one in (optimizer, releasing):
                one.apply_knobs(KNOBS.get(step, one.knobs))
            for micro_batch in range(1 + (step % 4 == 3)):
                last = micro_batch == step % 4 // 3
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
                backward(model, step + 50 * micro_batch)
            backward_of_twin(releasing, twin, step)
            early.append(len(optimizer.engine._executor.done_early()))
            if step == 5:
                next(model.parameters()).grad = None
            grads = [None if p.grad is None else p.grad.full_tensor() for p in model.parameters()]
            optimizer.step()
            releasing.step()
            plain.step(grads)
            for one in (optimizer, releasing):
                one.zero_grad()
            assert plain.same_weights(whole(model.parameters())), f"step {step}"  # type: ignore[arg-type]
            if step < 5:  # the twin had all gradients in the step that drops one
                assert same(whole(model.parameters()), whole(twin.parameters())), f"released, step {step}"
        assert any(early), "no gradient was copied before step()"


def backward_of_twin(releasing: tidegate.AdamW, twin: torch.nn.Module, step: int) -> None:
    if step % 4 == 3:
        twin.set_requires_gradient_sync(False)  # type: ignore[operator]
        with releasing.accumulate():
            backward(twin, step)
        twin.set_requires_gradient_sync(True)  # type: ignore[operator]
        backward(twin, step + 50)
    else:
        backward(twin, step)


def sums_on_the_host_are_those_of_the_device(mesh: DeviceMesh) -> None:
    model, twin = divided(mesh), divided(mesh)
    with optimizer_of(model) as optimizer, optimizer_of(twin, gradients="release", accumulation="host") as summing:
        for step in range(3):
            for micro_batch in (0, 50, 100):
                backward(model, step + micro_batch)
            with summing.accumulate():
                backward(twin, step)
                backward(twin, step + 50)
            assert all(param.grad is None for param in twin.parameters())
            backward(twin, step + 100)
            for one in (optimizer, summing):
                one.step()
                one.zero_grad()
            assert same(whole(model.parameters()), whole(twin.parameters())), f"summed, step {step}"


def norms_are_of_all_ranks(model: torch.nn.Sequential, part: int | None = None) -> None:
    """Clipping, and the decision to skip, are the same everywhere."""
    alone = copy.deepcopy([torch.nn.Parameter(param) for param in whole(model.parameters())])
    theirs = torch.optim.AdamW(alone, lr=0.01, weight_decay=0.1)
    with optimizer_of(model, max_grad_norm=0.05) as optimizer:
        norms: list[float | None] = []
        skipped: list[bool] = []
        optimizer.observers.append(lambda result, _: (norms.append(result.grad_norm), skipped.append(result.skipped)))
        for step in range(4):
            backward(model, step, part=part)
            for mine, param in zip(model.parameters(), alone, strict=True):
                param.grad = mine.grad.full_tensor()
            if step == 2:
                local = next(model.parameters()).grad.to_local()
                if dist.get_rank() == 1:
                    local[0, 0] = float("nan")
            else:
                norm = torch.nn.utils.clip_grad_norm_(alone, 0.05)
                theirs.step()
            optimizer.step()
            assert skipped[-1] == (step == 2)
            if step != 2:
                torch.testing.assert_close(torch.tensor(norms[-1]), norm, rtol=1e-6, atol=0)
            optimizer.zero_grad()
            for mine, param in zip(whole(model.parameters()), alone, strict=True):
                torch.testing.assert_close(mine, param.detach(), rtol=2e-5, atol=2e-7)
        same_everywhere(torch.tensor([n for n in norms if n == n], dtype=torch.float64))


def refuses_what_is_divided_otherwise(mesh: DeviceMesh) -> None:
    model = divided(mesh)
    with optimizer_of(model) as optimizer:
        backward(model, 0)
        param = next(model.parameters())
        param.grad = param.grad.redistribute(placements=[_replicate()])
        with pytest.raises(ParameterError, match="Redistribute"):
            optimizer.step()


def shows_its_state_as_dtensors(mesh: DeviceMesh) -> None:
    """As torch's AdamW does: whoever walks it asks for shards and whole tensors, and writes to neither."""
    model = divided(mesh)
    with optimizer_of(model) as optimizer:
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()["state"]
        for number, param in enumerate(model.parameters()):
            entry = optimizer.state[param]
            assert entry["step"].tolist() == 2
            for name in ("exp_avg", "exp_avg_sq"):
                shown, real = entry[name], saved[number][name]
                assert (type(shown), shown.placements, shown.shape) == (type(real), param.placements, param.shape)
                assert same([shown.full_tensor(), shown.to_local() + 0], [real.full_tensor(), real.to_local()])
                assert shown.to_local().tolist() == shown.to_local().numpy().tolist() == real.to_local().tolist()
                assert same([copy.deepcopy(shown).to_local()], [real.to_local()])
                entry[name] = shown.to("cpu", non_blocking=True)
                for write in (shown.zero_, shown.to_local().zero_, shown.to_local().view(-1).zero_):
                    with pytest.raises(ConfigError, match=r"optimizer\.load_state_dict\(state\)"):
                        write()
        optimizer.state[next(model.parameters())] = dict(optimizer.state[next(model.parameters())])
        after = optimizer.state_dict()["state"]
        assert all(same(whole([after[i]["exp_avg"]]), whole([saved[i]["exp_avg"]])) for i in saved)
        assert optimizer.state.pop(next(model.parameters()))["exp_avg"].full_tensor().any()


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def save(mesh: DeviceMesh, folder: Path) -> None:
    """A checkpoint of torch's, and beside it what an uninterrupted run has."""
    model = divided(mesh)
    with optimizer_of(model, folder / f"paths-{dist.get_rank()}") as optimizer:
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
        moments = [
            whole([values["exp_avg"], values["exp_avg_sq"]]) for values in optimizer.state_dict()["state"].values()
        ]
        if dist.get_rank() == 0:
            torch.save({"weights": whole_of(weights), "moments": moments}, folder / "expected.pt")
        else:
            whole_of(weights)


def resumes_from_its_own_checkpoint(mesh: DeviceMesh, folder: Path) -> None:
    model, again = divided(mesh), divided(mesh)
    with optimizer_of(model, folder / f"paths-{dist.get_rank()}") as optimizer, optimizer_of(again) as other:
        backward(model, 0)
        optimizer.step()
        optimizer.save_checkpoint(folder / "own")
        again.load_state_dict(model.state_dict())
        other.load_checkpoint(folder / "own")
        for step in (1, 2):
            for one, net in ((optimizer, model), (other, again)):
                one.zero_grad()
                backward(net, step)
                one.step()
        assert same(whole(model.parameters()), whole(again.parameters()))


def load(mesh: DeviceMesh, folder: Path) -> None:
    """That checkpoint on another number of ranks: state and the steps that follow are those of a single process."""
    model = divided(mesh)
    expected = torch.load(folder / "expected.pt")
    with optimizer_of(model, gradients="keep") as optimizer:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        moments = [
            whole([values["exp_avg"], values["exp_avg_sq"]]) for values in optimizer.state_dict()["state"].values()
        ]
        assert same(whole(model.parameters()), expected["weights"])
        assert all(same(mine, theirs) for mine, theirs in zip(moments, expected["moments"], strict=True))
        alone = network()
        with torch.no_grad():
            for param, value in zip(alone.parameters(), expected["weights"], strict=True):
                param.copy_(value)
        with optimizer_of(alone) as single:
            single.load_state_dict(gathered(optimizer))
            for step in range(3, 6):
                backward(model, step)
                for param, mine in zip(alone.parameters(), model.parameters(), strict=True):
                    param.grad = mine.grad.full_tensor()
                optimizer.step()
                single.step()
                optimizer.zero_grad()
                assert same(whole(model.parameters()), [p.detach() for p in alone.parameters()]), f"step {step}"
            # Whole tensors, as torch's own optimizer has them, are divided by whoever loads them.
            optimizer.load_state_dict(single.state_dict())
            moments = [whole([values["exp_avg"]])[0] for values in optimizer.state_dict()["state"].values()]
            assert same(moments, [values["exp_avg"] for values in single.state_dict()["state"].values()])


def gathered(optimizer: tidegate.AdamW) -> dict[str, Any]:
    state = optimizer.state_dict()
    return {
        **state,
        "state": {
            key: {name: value if name == "step" else value.full_tensor() for name, value in values.items()}
            for key, values in state["state"].items()
        },
    }


def whole_of(weights: dict[str, Any]) -> list[torch.Tensor]:
    return whole(weights.values())


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(some, others, strict=True))


def same_everywhere(value: torch.Tensor) -> None:
    of_rank_0 = value.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(value, of_rank_0)


def main(folder: Path, what: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "save":
        for name in ("one", "two"):
            (folder / f"paths-{rank}" / name).mkdir(parents=True)
        equals_the_oracle(mesh, None)
        equals_the_oracle(mesh, folder / f"paths-{rank}")
        sums_on_the_host_are_those_of_the_device(mesh)
        norms_are_of_all_ranks(divided(mesh))
        refuses_what_is_divided_otherwise(mesh)
        shows_its_state_as_dtensors(mesh)
        resumes_from_its_own_checkpoint(mesh, folder)
        save(mesh, folder)
    elif what == "twice":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norms_are_of_all_ranks(divided_twice(both), part=both.get_local_rank("dp"))
    else:
        equals_the_oracle(mesh, None)
        norms_are_of_all_ranks(divided(mesh))
        load(mesh, folder)
    (folder / f"{what}-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
