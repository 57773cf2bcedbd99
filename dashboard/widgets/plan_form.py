"""Form of the capacity planner. The address always contains the edited fields, so that the link can be shared."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

import streamlit as st

from tidegate import units
from tidegate.capacity.machine import AUX_BYTES, GPUS
from tidegate.capacity.model_shapes import MODELS, ModelShape, model_from_config
from tidegate.dashboard.data import plan_question
from tidegate.dashboard.data.plan_question import Question
from tidegate.dashboard.session import links
from tidegate.dashboard.style import markup
from tidegate.errors import ConfigError

ASKED: Final = "plan_asked"
OWN: Final = "of its config.json"
_PATHS_HELP: Final = (
    "A line for each path, GB/s that one node reads and writes: nvme:6.9/5.3. Then, as wanted, :duplex, :all-nodes "
    "(GB/s are of all nodes), :1.6TB (capacity), :endure=3PB (what may be written to it)."
)


def form() -> tuple[Question, ModelShape | None]:
    """Draws the form; returns the question in it, and the shape of an uploaded model, None if there is none."""
    asked: Question = st.session_state.get(ASKED) or Question.of_query(st.query_params.to_dict())
    st.html(markup.title("Model"))
    model, shape = _model(asked, st.session_state.get("plan_own_shape"))
    one, two, three = st.columns(3)
    sequence = _whole(one, "Sequence", "sequence", asked, 16, 1_048_576, "Tokens.")
    microbatch = _whole(two, "Micro-batch", "microbatch", asked, 1, 4096, "Sequences of a GPU at a time.")
    accumulation = _whole(three, "Accumulation", "accumulation", asked, 1, 4096, "Micro-batches for each update.")
    left, right = st.columns([4, 5], vertical_alignment="bottom")
    weight = _choice(left, "Weights", "weight", asked, list(AUX_BYTES))
    checkpointing = right.checkbox(
        "Recompute", key=_at("checkpointing", asked.checkpointing),
        help="Activation checkpointing: they are kept at block boundaries and computed again in the backward.",
    )  # fmt: skip
    st.html(markup.title("Machine"))
    one, two, three = st.columns([2, 1, 1])
    gpu = _choice(one, "GPU", "gpu", asked, list(GPUS))
    gpus = _whole(two, "In a node", "gpus", asked, 1, 64)
    nodes = _whole(three, "Nodes", "nodes", asked, 1, 4096)
    left, right = st.columns(2)
    host_memory = _number(left, "Host memory, GB", "host_memory", asked, 1, 65_536, "Of each node.")
    gpu_memory = _number(right, "GPU memory, GB", "gpu_memory", asked, 0, 1024, "0: as this kind of GPU has.")
    paths = st.text_area(
        "Storage paths, GB/s read/write", key=_at("paths", asked.paths), height=68, help=_PATHS_HELP,
        placeholder="none: everything in host memory",
    )  # fmt: skip
    with st.expander("Speeds"):
        host = _number(st, "Host memory moves, GB/s", "host_bandwidth", asked, 1, 10_000, "Of a node, both ways.")
        fabric = _number(st, "A GPU to other nodes, GB/s", "fabric", asked, 0.01, 10_000)
        share = _number(st, "Share of the GPU's peak", "flop_share", asked, 0.01, 1.0, "That training reaches.")
    found = Question(
        model=model, gpu=gpu, gpus=gpus, nodes=nodes, gpu_memory=gpu_memory, host_memory=host_memory, paths=paths,
        sequence=sequence, microbatch=microbatch, accumulation=accumulation, weight=weight,
        checkpointing=checkpointing, host_bandwidth=host, fabric=fabric, flop_share=share,
    )  # fmt: skip
    st.session_state[ASKED] = found
    links.remember({name: found.query().get(name) for name in asdict(found)})
    return found, shape


def _model(asked: Question, own: ModelShape | None) -> tuple[str, ModelShape | None]:
    known = plan_question.names()
    options = [*known, OWN]
    first = OWN if own is not None else asked.model if asked.model in known else known[0]
    chosen = st.selectbox("Model", options, key=_at("model", first), format_func=_size)
    if chosen != OWN:
        st.session_state.pop("plan_own_shape", None)
        return str(chosen), None
    given = st.file_uploader("config.json of a Hugging Face model", type="json", key="plan_config")
    if given is not None:
        try:
            own = model_from_config(json.loads(given.getvalue()), name=given.name.removesuffix(".json")[:40] or "mine")
            st.session_state["plan_own_shape"] = own
        except (ConfigError, ValueError, RecursionError) as error:
            st.error(markup.plain(f"{given.name} is not the config.json of a model: {error}"))
    if own is None:
        st.caption(markup.plain(f"Until one is given, {asked.model} is planned."))
    else:
        st.caption(markup.plain(f"{own.name} is not in the address of this page: whoever opens it sees {asked.model}."))
    return asked.model, own


def _size(name: str) -> str:
    return f"{name} · {units.count(MODELS[name].params)}" if name in MODELS else f"another, {name}"


def _choice(where: Any, label: str, name: str, asked: Question, options: list[str]) -> str:
    value = getattr(asked, name)
    return str(where.selectbox(label, options, key=_at(name, value if value in options else options[0])))


def _whole(where: Any, label: str, name: str, asked: Question, least: int, most: int, hint: str | None = None) -> int:
    value = min(max(int(getattr(asked, name)), least), most)
    return int(where.number_input(label, least, most, key=_at(name, value), help=hint))


def _number(
    where: Any, label: str, name: str, asked: Question, least: float, most: float, hint: str | None = None
) -> float:
    value = min(max(float(getattr(asked, name)), float(least)), float(most))
    return float(where.number_input(label, float(least), float(most), key=_at(name, value), help=hint, format="%g"))


def _at(name: str, value: object) -> str:
    return links.field_key(f"plan_{name}", value)
