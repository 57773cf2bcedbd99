"""Answer of the capacity planner: whether the model fits, iteration time, memory by place, and recommended changes."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from tidegate import units
from tidegate.capacity import recipe
from tidegate.capacity.model_shapes import ModelShape
from tidegate.capacity.planner import CapacityPlan
from tidegate.dashboard.data import plan_question
from tidegate.dashboard.data.plan_question import Question
from tidegate.dashboard.style import markup, palette, snippets
from tidegate.errors import ConfigError


def answer(asked: Question, shape: ModelShape | None) -> None:
    """Draws the capacity planner's answer to the question `asked`, in parts from top to bottom. So the user sees
    whether the model fits before the parts that take seconds to compute.

    shape: an uploaded model; None if there is none.
    """
    try:
        plan = plan_question.answer(asked, shape)
    except ConfigError as error:
        st.html(markup.verdict("This cannot be planned."))
        st.error(markup.plain(str(error)))
        return
    st.html(markup.verdict(verdict(plan)))
    for shortage in plan.shortages:
        st.html(markup.banner(f"Short of {shortage}."))
    if plan.fits:
        st.html(markup.kpis(_figures(plan)))
    left, right = st.columns(2, gap="medium")
    with left:
        st.html(_places("State lives in", "of all GPUs", plan.state_bytes) + _wear(plan))
        if plan.fits:
            st.html(_phases(plan) + _busy(plan))
    with right:
        st.html(
            _memory("Memory of one GPU", plan.device_bytes, plan.machine.gpu_memory_bytes)
            + _memory("Memory of one node", plan.host_bytes, plan.machine.host_memory_bytes)
        )
    _help(asked, shape)
    if plan.fits:
        _recipes(plan)
    with st.expander("What these figures rest on"):
        st.html("<br>".join(snippets.say(sentence) for sentence in plan.assumptions))


def verdict(plan: CapacityPlan) -> str:
    """One sentence that says whether the model fits on the machine and, if so, how long an iteration takes, which phase
    is the longest, and which resource limits the speed."""
    machine = plan.machine
    nodes = "one node" if machine.nodes == 1 else f"{machine.nodes} nodes"
    gpus = f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''}"
    where = f"{plan.model.name} ({units.count(plan.model.params)} parameters) on {nodes} of {gpus}"
    if plan.iteration_seconds is None:
        return f"{where} does not fit."
    longest = max(plan.phases, key=lambda phase: plan.phases[phase])
    return (
        f"{where} fits: {units.seconds(plan.iteration_seconds)} an iteration; the {longest} is the longest phase and "
        f"waits for {plan.bottleneck}."
    )


def _figures(plan: CapacityPlan) -> list[tuple[str, str, str]]:
    effective = plan.fit.effective
    update, total = plan.phases.get("update", 0.0), plan.iteration_seconds or 1.0
    return [
        ("iteration", units.seconds(plan.iteration_seconds), "all three phases"),
        ("tokens", f"{units.count(plan.tokens_per_second)}/s", "of all GPUs"),
        ("update", units.seconds(update), f"{units.share(update / total)} of the iteration"),
        ("near its bound", units.share(plan.bound_share), "of the update"),
        ("stride", units.knob("stride", effective.stride), f"static ratio {units.significant(effective.static_ratio)}"),
        ("host cache", units.nbytes(effective.host_cache_bytes), "for each GPU"),
    ]


def _phases(plan: CapacityPlan) -> str:
    total = plan.iteration_seconds or 1.0
    rows = [
        (markup.dot(phase, palette.PHASE.get(phase, palette.GREY)), units.seconds(seconds),
         markup.bar(seconds / total, units.share(seconds / total), palette.PHASE.get(phase, palette.GREY)))
        for phase, seconds in plan.phases.items()
    ]  # fmt: skip
    return markup.title("Phases", "of one iteration") + markup.table(("", "seconds", "share"), rows)


def _busy(plan: CapacityPlan) -> str:
    """A table, as HTML, of the busy time of each resource during the update. The first row, with the longest time, is
    the bottleneck. Empty if there is no simulated update."""
    if plan.update is None or plan.update.seconds <= 0:
        return ""
    rows = [
        (markup.dot(name, palette.lane(name)), units.seconds(seconds),
         markup.bar(seconds / plan.update.seconds, units.share(seconds / plan.update.seconds), palette.lane(name)))
        for name, seconds in sorted(plan.update.busy.items(), key=lambda item: -item[1])
        if seconds > 0
    ]  # fmt: skip
    return markup.title("Busy in the update", "the first is what it waits for") + markup.table(
        ("", "seconds", "of the update"), rows
    )


def _wear(plan: CapacityPlan) -> str:
    worn = [wear for wear in plan.wear if wear.bytes_per_iteration > 0]
    if not worn:
        return ""
    rows = [
        (markup.dot(wear.path, palette.residence(wear.path)), units.nbytes(wear.bytes_per_iteration),
         units.nbytes(wear.bytes_per_day), units.NONE if wear.days is None else units.duration(wear.days * 86_400))
        for wear in worn
    ]  # fmt: skip
    columns = ("", "written an iteration", "written a day", "endures")
    return markup.title("Wear", "of one node's path, or of a shared one") + markup.table(columns, rows)


def _places(name: str, note: str, found: Mapping[str, int]) -> str:
    total = sum(found.values())
    rows = [
        (markup.dot(place, palette.residence(place)), units.nbytes(nbytes),
         markup.bar(nbytes / total, units.share(nbytes / total), palette.residence(place)) if total else units.NONE)
        for place, nbytes in found.items()
    ]  # fmt: skip
    return markup.title(name, note) + markup.table(("", "bytes", "share"), rows)


def _memory(name: str, found: Mapping[str, float], available: float) -> str:
    total = sum(found.values())
    if not total:
        return ""
    rows = [
        (kind, units.nbytes(nbytes), markup.bar(nbytes / available, units.share(nbytes / available), palette.GREY))
        for kind, nbytes in found.items()
        if nbytes
    ]
    note = f"{units.nbytes(total)} of {units.nbytes(available)}"
    return markup.title(name, note) + markup.table(("", "bytes", "of it"), rows)


def _help(asked: Question, shape: ModelShape | None) -> None:
    st.html(markup.title("What would help", "each planned and simulated; in tokens a second of each GPU"))
    with st.spinner("Planning the alternatives …"):
        found = plan_question.changes(asked, shape)
    if not found:
        st.html(snippets.nothing("No single change that was tried brings more than 2 %."))
        return
    rows = [
        (change.kind, change.what, units.seconds(change.iteration_seconds),
         "then it fits" if change.gain is None else f"× {change.gain:.2f}")
        for change in found
    ]  # fmt: skip
    st.html(markup.table(("", "what", "iteration", "gain"), rows, left=(0, 1), wide=(1,)))


def _recipes(plan: CapacityPlan) -> None:
    st.html(markup.title("To train so"))
    python, deepspeed = st.tabs(["Python", "DeepSpeed"])
    python.code(recipe.python(plan), language="python")
    deepspeed.code(recipe.deepspeed_text(plan), language="json")
