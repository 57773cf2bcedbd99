"""`tidegate plan`: whether a model trains on a machine, where its state will live, and what changes are recommended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tidegate.capacity.machine import AUX_BYTES, GB, GPUS, Machine, Workload, gpu_named, parse_path
from tidegate.capacity.model_shapes import model_from
from tidegate.capacity.planner import CapacityPlan, plan_capacity
from tidegate.capacity.recipe import deepspeed, deepspeed_text, python
from tidegate.capacity.recommendations import Change, best_changes
from tidegate.errors import ConfigError
from tidegate.rules.rule import names
from tidegate.speeds.saved_calibration import Calibration
from tidegate.terminal import say


def plan(
    model: Annotated[str, typer.Option(help="A name such as llama-70b, or the config.json of a Hugging Face model.")],
    gpus: Annotated[int, typer.Option(help="GPUs of each node.")] = 8,
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(GPUS)}.")] = "a100-80",
    gpu_memory: Annotated[float | None, typer.Option(help="GB of each GPU; default: as its kind has.")] = None,
    host_memory: Annotated[float, typer.Option(help="GB of each node.")] = 512,
    path: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:READ/WRITE",
            help="A storage path, GB/s for each node; then :duplex, :all-nodes (GB/s are of "
            "all nodes), :1.6TB (capacity), :endure=3PB (what may be written). Repeat it.",
        ),
    ] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    microbatch: Annotated[int, typer.Option(help="Sequences of a rank at a time.")] = 1,
    accumulation: Annotated[int, typer.Option(help="Micro-batches for each update.")] = 1,
    weight: Annotated[str, typer.Option(help=f"Dtype of weights: {', '.join(AUX_BYTES)}.")] = "bfloat16",
    rule: Annotated[str, typer.Option(help=f"Update rule: {', '.join(names())}.")] = "adamw",
    checkpointing: Annotated[bool, typer.Option(help="Compute activations again in the backward.")] = True,
    host_bandwidth: Annotated[float, typer.Option(help="GB/s that a node's memory moves.")] = 200,
    fabric: Annotated[float, typer.Option(help="GB/s of a GPU to other nodes.")] = 12,
    flop_share: Annotated[float, typer.Option(help="Share of a GPU's peak that training reaches.")] = 0.45,
    rates: Annotated[
        Path | None, typer.Option(help="JSON that `tidegate calibrate --json` printed: speeds of links and cores.")
    ] = None,
    advice: Annotated[
        bool, typer.Option(help="Also simulate changes, and list those that help most: takes longest.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Plan a training: does it fit, where will state live, how long is an iteration, what to change or to buy."""
    kind = gpu_named(gpu)
    machine = Machine.of(
        kind,
        gpus=gpus,
        nodes=nodes,
        gpu_memory_bytes=kind.memory_bytes if gpu_memory is None else gpu_memory * GB,
        host_memory_bytes=host_memory * GB,
        paths=tuple(parse_path(word) for word in path or []),
        host_bytes_per_second=host_bandwidth * GB,
        fabric_bytes_per_second=fabric * GB,
        flop_share=flop_share,
    )
    work = Workload(
        sequence=sequence,
        microbatch=microbatch,
        accumulation=accumulation,
        weight=weight,
        checkpointing=checkpointing,
        rule=rule,
    )
    found = plan_capacity(
        model_from(model), machine if rates is None else machine.measured(_load_calibration(rates).card), work
    )
    changes = best_changes(found) if advice else ()
    if as_json:
        say(json.dumps(_json(found, changes)))
    else:
        say("\n".join([*_lines(found), *(_advice(changes) if advice else []), *_assumptions(found)]))


def _load_calibration(file: Path) -> Calibration:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} has no valid calibration: {str(error).rstrip('.')}. Write it with `tidegate calibrate --json`."
        ) from error
    try:
        return Calibration.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _json(found: CapacityPlan, changes: tuple[Change, ...]) -> dict[str, object]:
    pasted = {"python": python(found), "deepspeed": deepspeed(found)} if found.fits else {}
    shown = [
        {"kind": c.kind, "what": c.what, "iteration_seconds": c.iteration_seconds, "gain": c.gain} for c in changes
    ]
    return {**found.to_dict(), "changes": shown, "configuration": pasted}


def _lines(found: CapacityPlan) -> Iterator[str]:
    shape, machine = found.model, found.machine
    yield (
        f"{shape.name}, {shape.params / 1e9:.1f} G parameters, on {machine.nodes} x {machine.gpus} GPUs of "
        f"{machine.gpu_memory_bytes / 1e9:.0f} GB, {machine.host_memory_bytes / 1e9:.0f} GB of host memory a node"
    )
    yield ""
    if found.fits:
        yield from _figures(found)
    else:
        yield "Does not fit."
        yield from (f"  {shortage}." for shortage in found.shortages)


def _advice(changes: tuple[Change, ...]) -> Iterator[str]:
    yield ""
    yield "What would help most:" if changes else "Nothing that was tried would help by 2 % or more."
    yield from (f"  {change.kind}: {change}." for change in changes)


def _assumptions(found: CapacityPlan) -> Iterator[str]:
    yield from ("", "Assumed:")
    yield from (f"  {sentence}" for sentence in found.assumptions)
    if found.fits:
        yield from ("", "Configuration:", "", python(found))
        if found.work.rule == "adamw":
            yield from ("or for DeepSpeed:", "", deepspeed_text(found))


def _figures(found: CapacityPlan) -> Iterator[str]:
    assert found.update is not None, "what fits is simulated"
    phases = ", ".join(f"{name} {length:.3g} s" for name, length in found.phases.items())
    seconds, tokens = found.iteration_seconds, found.tokens_per_second
    yield f"Fits. An iteration takes {seconds:.3g} s ({phases}): {tokens:,.0f} tokens/s."
    yield f"The longest phase waits for {found.bottleneck}; the update is at {found.bound_share:.0%} of what it allows."
    homes = ", ".join(f"{home} {nbytes / 1e9:,.0f} GB" for home, nbytes in found.state_bytes.items() if nbytes)
    yield f"State: {homes}."
    yield f"GPU memory of each: {_kinds(found.device_bytes)}."
    yield f"Host memory of each node: {_kinds(found.host_bytes)}."
    for wear in found.wear:
        life = f": its endurance lasts {wear.days:,.0f} days" if wear.days is not None else ""
        yield f"Path {wear.path} is written {wear.bytes_per_day / 1e12:,.1f} TB a day{life}."


def _kinds(kinds: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {nbytes / 1e9:,.1f}" for kind, nbytes in kinds.items() if nbytes >= 5e7) + " GB"
