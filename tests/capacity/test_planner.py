"""Capacity plans: what fits, where state goes, and what faster or larger parts may not make worse."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.agent.integrations.deepspeed.settings import settings_of
from tidegate.capacity.footprint import FRAMEWORK_HOST_BYTES, SUMS_STAGING_BYTES, device_room, host_room
from tidegate.capacity.machine import GPUS, Machine, PlannedPath, Workload, parse_path
from tidegate.capacity.many_ranks import NodeShare
from tidegate.capacity.model_shapes import MODELS, PAPER_MODELS, ModelShape, model_from, model_from_config
from tidegate.capacity.pass_times import gather_seconds
from tidegate.capacity.placement_fit import fit
from tidegate.capacity.planner import CapacityPlan, plan_capacity
from tidegate.capacity.recipe import deepspeed, python
from tidegate.capacity.recipe import settings as recipe
from tidegate.capacity.recommendations import best_changes
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import OFF
from tidegate.simulator.steady_state import steady_steps

NVME = parse_path("nvme:6.9/5.3")
PFS = parse_path("pfs:3.6/3.6")
NODE = Machine.of(GPUS["h100-80"], gpus=4, paths=(NVME, PFS))


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_twelve_models_of_the_papers(name: str) -> None:
    nodes = 8 if PAPER_MODELS[name].params > 130e9 else 2 if PAPER_MODELS[name].params > 110e9 else 1
    plan = plan_capacity(PAPER_MODELS[name], replace(NODE, nodes=nodes))
    assert plan.fits, plan.shortages
    state = 10 * PAPER_MODELS[name].params
    assert sum(plan.state_bytes.values()) == pytest.approx(state, rel=1e-6)
    assert sum(plan.fit.device.values()) <= device_room(plan.machine)
    assert sum(plan.fit.host.values()) <= host_room(plan.machine)
    assert 0 < plan.update.seconds < 600 if plan.update else False
    assert 0 < (plan.bound_share or 0) <= 1


def test_state_goes_to_the_gpu_then_to_the_host_then_to_paths() -> None:
    homes = {name: set(plan_capacity(MODELS[name], NODE).state_bytes) for name in ("7B", "40B", "100B")}
    assert homes == {"7B": {"device"}, "40B": {"device", "host"}, "100B": {"device", "host", "nvme", "pfs"}}


def test_a_gather_takes_what_the_slower_of_node_and_fabric_takes() -> None:
    """A ring over all ranks: each GPU has its own link in the node, and its own to other nodes."""
    machine = Machine(gpus=4, nodes=2, node_link_bytes_per_second=100e9, fabric_bytes_per_second=10e9)
    assert gather_seconds(8e9, machine) == pytest.approx(max(8e9 * 7 / 8 / 100e9, 8e9 / 2 / (4 * 10e9)))
    fast = replace(machine, fabric_bytes_per_second=100e9)
    assert gather_seconds(8e9, fast) == pytest.approx(8e9 * 7 / 8 / 100e9)
    alone = replace(machine, gpus=1)
    assert gather_seconds(8e9, alone) == pytest.approx(8e9 / 2 / 10e9)
    assert gather_seconds(8e9, replace(machine, nodes=1)) == pytest.approx(8e9 * 3 / 4 / 100e9)


def test_what_does_not_fit_says_where_and_by_how_much() -> None:
    no_gpu = plan_capacity(MODELS["280B"], NODE)
    assert [s.where for s in no_gpu.shortages] == ["GPU memory"]
    assert no_gpu.shortages[0].missing_bytes == pytest.approx(sum(no_gpu.fit.device.values()) - 0.92 * 80e9)
    assert (no_gpu.iteration_seconds, no_gpu.tokens_per_second) == (None, None)
    no_path = plan_capacity(MODELS["70B"], replace(NODE, paths=()))
    assert [s.where for s in no_path.shortages] == ["host memory"]
    tight = replace(NODE, paths=(replace(NVME, capacity_bytes=50e9),))
    assert [s.where for s in plan_capacity(MODELS["70B"], tight).shortages] == ["storage paths"]
    enough = replace(NODE, paths=(replace(NVME, capacity_bytes=1.6e12),))
    assert plan_capacity(MODELS["70B"], enough).fits
    # One that takes not even a subgroup is left out; the other takes it all.
    one_left = replace(NODE, paths=(replace(NVME, capacity_bytes=1e9), PFS))
    assert set(plan_capacity(MODELS["70B"], one_left).state_bytes) == {"device", "host", "pfs"}


def test_280_billion_parameters_on_32_and_on_512_ranks() -> None:
    began = time.process_time()
    plan = plan_capacity(MODELS["280B"], Machine.of(GPUS["a100-40"], gpus=4, nodes=8, paths=(NVME, PFS)))
    # Of processor time: what others do on this machine does not count. All strides, not one simulation.
    assert time.process_time() - began < 2
    assert plan.fits, plan.shortages
    assert plan.machine.ranks == 32
    few = plan_capacity(MODELS["280B"], Machine.of(GPUS["a100-40"], gpus=8, nodes=16, paths=(NVME, PFS)))
    many = plan_capacity(MODELS["280B"], Machine.of(GPUS["a100-40"], gpus=8, nodes=64, paths=(NVME, PFS)))
    assert many.machine.ranks == 512
    assert (many.update, few.update) != (None, None)
    assert many.phases["update"] <= few.phases["update"]


MACHINES = st.builds(
    lambda gpu, gpus, host, bandwidth, paths: Machine.of(
        GPUS[gpu],
        gpus=gpus,
        host_memory_bytes=host,
        host_bytes_per_second=bandwidth,
        paths=tuple(replace(path, name=f"p{i}") for i, path in enumerate(paths)),
    ),
    st.sampled_from(["a100-40", "a100-80", "h100-80"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([128e9, 256e9, 512e9]),
    st.floats(50e9, 400e9),
    st.lists(
        st.builds(
            PlannedPath,
            name=st.just("p"),
            read_bytes_per_second=st.floats(1e9, 14e9),
            write_bytes_per_second=st.floats(1e9, 14e9),
            duplex=st.booleans(),
        ),
        min_size=1,
        max_size=2,
    ),
)


def faster(machine: Machine, part: str, times: float) -> Machine:
    if part == "path":
        first, *others = machine.paths
        first = replace(
            first,
            read_bytes_per_second=times * first.read_bytes_per_second,
            write_bytes_per_second=times * first.write_bytes_per_second,
        )
        return replace(machine, paths=(first, *others))
    names = ("h2d_bytes_per_second", "d2h_bytes_per_second") if part == "link" else (part,)
    return replace(machine, **{name: times * getattr(machine, name) for name in names})


@settings(max_examples=examples(6))
@given(
    MACHINES,
    st.sampled_from(["7B", "13B", "40B"]),
    st.sampled_from(
        ["path", "host_bytes_per_second", "host_memory_bytes", "gpu_memory_bytes", "flops_per_second", "link"]
    ),
    st.sampled_from([1.1, 2.0, 4.0]),
)
def test_more_of_one_thing_is_never_slower(machine: Machine, name: str, part: str, times: float) -> None:
    """Within 2 %: lanes take what is ready in an order that a faster part may change (Graham's anomalies)."""
    now, then = plan_capacity(MODELS[name], machine), plan_capacity(MODELS[name], faster(machine, part, times))
    assert then == plan_capacity(MODELS[name], faster(machine, part, times))
    if now.iteration_seconds is None:
        return
    assert then.iteration_seconds is not None, then.shortages
    assert then.iteration_seconds <= 1.02 * now.iteration_seconds


def test_a_path_of_all_nodes_is_shared_by_all_ranks() -> None:
    shared = replace(PFS, all_nodes=True)
    two = [
        plan_capacity(MODELS["120B"], replace(NODE, nodes=2, paths=(NVME, path)))
        for path in (PFS, shared, replace(shared, read_bytes_per_second=7.2e9, write_bytes_per_second=7.2e9))
    ]
    assert two[1].phases["update"] > two[0].phases["update"]
    assert two[2].phases["update"] == pytest.approx(two[0].phases["update"])


def test_wear_is_what_the_update_writes() -> None:
    worn = replace(NVME, endurance_bytes=5e15)
    plan = plan_capacity(MODELS["70B"], replace(NODE, paths=(worn,)))
    [wear] = plan.wear
    assert wear.bytes_per_iteration == pytest.approx(plan.state_bytes["nvme"])
    assert wear.bytes_per_day == pytest.approx(wear.bytes_per_iteration * 86_400 / (plan.iteration_seconds or 0))
    assert wear.days == pytest.approx(5e15 / wear.bytes_per_day)
    assert plan_capacity(MODELS["7B"], NODE).wear == ()


def test_changes_are_what_the_planner_finds_when_they_are_made() -> None:
    plan = plan_capacity(MODELS["70B"], NODE)
    found = best_changes(plan)
    assert len(found) == 3
    gains = [change.gain or 0 for change in found]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 1.02
    [memory] = [change for change in found if "twice the host memory" in change.what]
    then = plan_capacity(MODELS["70B"], replace(NODE, host_memory_bytes=2 * NODE.host_memory_bytes))
    assert memory.iteration_seconds == then.iteration_seconds
    assert memory.gain == pytest.approx((plan.iteration_seconds or 0) / (then.iteration_seconds or 1))


def test_changes_of_what_does_not_fit_are_those_with_which_it_does() -> None:
    plan = plan_capacity(MODELS["70B"], replace(NODE, paths=()))
    assert {change.gain for change in best_changes(plan)} == {None}
    far = best_changes(plan_capacity(MODELS["280B"], replace(NODE, paths=())))
    assert [change.what for change in far] == ["8 nodes of 4 GPUs"]


@pytest.mark.parametrize("name", ["7B", "20B", "70B"])
def test_the_configuration_to_paste_is_one_that_the_engine_takes(name: str) -> None:
    from tidegate import Offload

    plan = plan_capacity(MODELS[name], NODE)
    offload = Offload(**recipe(plan))
    assert offload.knobs().stride == plan.fit.effective.stride
    assert set(offload.paths) == set(plan.fit.rank.host_slots)
    compile(python(plan), "pasted", "exec")
    block = json.loads(json.dumps(deepspeed(plan)))
    assert block["zero_optimization"]["sub_group_size"] == plan.work.subgroup_numel
    assert Offload(**block["tidegate"]) == offload
    # Hugging Face's trainers refuse the word where it is not one of theirs.
    assert '"auto"' not in json.dumps(block)


@pytest.mark.parametrize(("memory", "num_slots"), [(24e9, 2), (40e9, 2), (40e9, 8)])
def test_released_gradients_have_the_memory_that_the_recipe_gives_them(memory: float, num_slots: int) -> None:
    """Those of subgroups that live on the GPU or are staged stay there until the update, if there is room; the rest is
    spilled, into slots that have room for it."""
    machine = Machine(gpus=4, gpu_memory_bytes=memory, host_memory_bytes=2e12)
    plan = plan_capacity(MODELS["13B"], machine, Workload(num_slots=num_slots))
    assert plan.fits
    assert plan.fit.gradients == "release"
    (step,) = steady_steps(plan.fit.rank, plan.fit.effective, NodeShare(machine, plan.work).card)
    device = plan.fit.device
    assert device["state"] + device["slots"] == step.device_bytes()
    assert sum(device.values()) <= device_room(machine)
    kept = [
        subgroup.nbytes("gradient")
        for subgroup, placement in zip(plan.fit.rank.subgroups, step.placements, strict=True)
        if placement.processor == "device" and not placement.spilled
    ]
    assert 0 < sum(kept) <= device["gradients"]
    assert recipe(plan)["gradient_memory_bytes"] == int(device["gradients"])


def test_sums_of_micro_batches_are_counted_where_the_recipe_puts_them() -> None:
    """Released gradients of more than one micro-batch: on the host, and so they are asked of the engine."""
    once = fit(MODELS["70B"], NODE, Workload(), "release")
    often = fit(MODELS["70B"], NODE, Workload(accumulation=4), "release")
    sums = often.host["sums"] - SUMS_STAGING_BYTES
    assert sums == pytest.approx(2 * MODELS["70B"].params / NODE.ranks)
    assert "sums" not in once.host
    assert "sums" not in fit(MODELS["70B"], NODE, Workload(accumulation=4), "keep").host
    # GPUs on which whole gradients have no room.
    tight = replace(NODE, gpu_memory_bytes=60e9)
    plan = plan_capacity(MODELS["70B"], tight, Workload(accumulation=4))
    assert (plan.fit.gradients, recipe(plan)["accumulation"]) == ("release", "host")
    assert "with optimizer.accumulate():" in python(plan)
    block = deepspeed(plan)
    assert settings_of(block["tidegate"], block).offload.accumulation == "host"
    alone = plan_capacity(MODELS["70B"], tight)
    assert "accumulation" not in recipe(alone)


def test_the_framework_alone_may_need_more_than_the_host_has() -> None:
    """All state fits the GPUs, and yet it does not run."""
    plan = plan_capacity(MODELS["7B"], replace(NODE, gpus=8, host_memory_bytes=16e9))
    [short] = plan.shortages
    assert short.where == "host memory"
    assert short.needed_bytes == pytest.approx(8 * FRAMEWORK_HOST_BYTES)
    assert short.available_bytes == pytest.approx(0.9 * 16e9)


def test_few_parameters_on_many_ranks_are_a_model_and_changes_beyond_are_left_out() -> None:
    small = ModelShape(name="m", layers=1, hidden=4, heads=1, kv_heads=1, ffn=4, vocab=4, tied=True)
    ranks = 64
    assert ranks < small.params < 2 * ranks
    plan = plan_capacity(small, replace(NODE, gpus=ranks))
    assert plan.fits
    assert all("nodes" not in change.what for change in best_changes(plan, 100))


def hugging_face(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000, "tie_word_embeddings": False,
    } | changes  # fmt: skip


def test_a_hugging_face_config_is_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hugging_face()))
    for where in (tmp_path, tmp_path / "config.json"):
        found = model_from(str(where))
        assert replace(found, name="llama-70b") == MODELS["llama-70b"]
    assert model_from_config({"text_config": hugging_face()}).params == MODELS["llama-70b"].params
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    assert model_from_config(gpt2).params == pytest.approx(124e6, rel=0.01)
    falcon: dict[str, Any] = {"model_type": "falcon", "vocab_size": 65024, "multi_query": True}
    small = falcon | {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71}
    assert model_from_config(small).params == pytest.approx(6.92e9, rel=0.01)
    large = {"num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8}
    large |= falcon | {"new_decoder_architecture": True}
    assert model_from_config(large).params == pytest.approx(41.3e9, rel=0.01)
    mixtral = hugging_face(
        model_type="mixtral", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=14336,
        num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    assert model_from_config(mixtral).params == pytest.approx(46.7e9, rel=0.01)
    assert model_from_config(mixtral).active_params == pytest.approx(12.9e9, rel=0.02)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "not a JSON object"),
        ({}, "lacks num_hidden_layers, hidden_size, num_attention_heads, vocab_size"),
        (hugging_face(hidden_size=-1), "hidden_size=-1"),
        (hugging_face(hidden_size="8192"), "hidden_size='8192'"),
        (hugging_face(kv_lora_rank=512), "kv_lora_rank"),
        (hugging_face(ffn_config={"ffn_hidden_size": 10}), "ffn_config"),
        (hugging_face(model_type="llama4_text"), "model_type 'llama4_text'"),
        (hugging_face(model_type="mamba"), "model_type 'mamba'"),
        (hugging_face(vocab_size=10**12), "more than 1e"),
        (hugging_face(hidden_size=10**400), "more than 1e"),
        ({"text_config": "x"}, "text_config .* is not a JSON object"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        model_from_config(config)


@pytest.mark.parametrize(
    "text",
    [
        "nvme",
        "nvme:fast",
        "nvme:6.9",
        "nvme:6.9/0",
        "nvme:-1/5",
        "host:1/1",
        "nvme:1/1:twice",
        "nvme:nan/1",
        "a:1/1:3XB",
        "nvme:6.9/5.3:1.2.3TB",
        "nvme:6.9/5.3:0TB",
        "nvme:6.9/5.3:endure=0PB",
    ],
)
def test_a_path_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_path(text)


def test_a_path_says_all_there_is() -> None:
    found = parse_path("nvme:6.9/5.3:duplex:all-nodes:1.6TB:endure=3PB")
    assert found == PlannedPath(
        name="nvme", read_bytes_per_second=6.9e9, write_bytes_per_second=5.3e9, duplex=True, all_nodes=True,
        capacity_bytes=1.6e12, endurance_bytes=3e15,
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: Machine(gpus=0),
        lambda: Machine(gpus=4, nodes=0),
        lambda: Machine(gpus=4, gpu_memory_bytes=-1.0),
        lambda: Machine(gpus=4, host_memory_bytes=float("nan")),
        lambda: Machine(gpus=4, flop_share=1.5),
        lambda: Machine(gpus=4, paths=(NVME, NVME)),
        lambda: Workload(sequence=0),
        lambda: Workload(weight="int8"),
        lambda: ModelShape(name="m", layers=0, hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1),
        lambda: plan_capacity(
            ModelShape(name="m", layers=1, hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1), replace(NODE, gpus=64)
        ),
    ],
)
def test_impossible_inputs_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_without_room_for_slots_nothing_is_staged() -> None:
    tight = replace(NODE, gpu_memory_bytes=1.0)
    need = sum(plan_capacity(MODELS["70B"], tight).fit.device.values())
    found: CapacityPlan = plan_capacity(MODELS["70B"], replace(NODE, gpu_memory_bytes=(need + 1e9) / 0.92))
    assert found.fits
    assert found.fit.effective.stride == OFF
    assert found.fit.effective.static_ratio < 0.01
