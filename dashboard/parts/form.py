"""The form that turns the knobs. It is outside every live part of the page, so that a refresh never eats an edit."""

from __future__ import annotations

from typing import Any

import streamlit as st

from tidegate.client import DaemonClient
from tidegate.dashboard import edits, feed, markup, units
from tidegate.errors import DaemonError, DaemonUnreachable, KnobError, NotAuthorized, StaleKnobs
from tidegate.knob_kinds import show_size
from tidegate.knobs import PATH_KNOBS
from tidegate.wire import KnobBound, KnobPreview, KnobsView

TOKEN = "operate_token"
WAIT_SECONDS = 2.0
_NOTICE = {"error": st.error, "warning": st.warning, "success": st.success, "info": st.info}


def form(url: str, knobs: KnobsView) -> None:
    """Token, fields and buttons for the run of `knobs`."""
    run = knobs.run
    st.html(markup.title("Turn the knobs", "applied by all ranks between the same two steps"))
    st.text_input(
        "Operate token", type="password", key=TOKEN, autocomplete="off", placeholder="needed to change anything",
        help="The daemon writes it to operate.token in its state directory. It stays in this session.",
    )  # fmt: skip
    allowed = bool(st.session_state.get(TOKEN))
    if not allowed:
        st.caption(
            "Enter the operate token, the content of `operate.token` in the daemon's state directory, to use the form."
        )
    _prepare(knobs)
    _show_notice(run)
    with st.form(f"knobs:{run}", border=True, enter_to_submit=False):
        for names in _rows(knobs):
            for column, name in zip(st.columns(len(names)), names, strict=True):
                with column:
                    _field(run, name, knobs.bounds[name], allowed)
        st.text_input("Reason, for the audit log", key=_key(run, "reason:"), max_chars=500, disabled=not allowed)
        bar = st.container(horizontal=True)
        with bar:
            st.form_submit_button("Set", type="primary", disabled=not allowed, on_click=_set, args=(url, knobs))
            st.form_submit_button("Preview", disabled=not allowed, on_click=_preview, args=(url, knobs))
            st.form_submit_button("Reset form", disabled=not allowed, on_click=_reset, args=(url, run))


def _rows(knobs: KnobsView) -> list[list[str]]:
    """The knobs of every run, and below them those of its storage paths, if it has any."""
    first = [name for name in knobs.bounds if name not in PATH_KNOBS]
    return [names for names in (first, [name for name in knobs.bounds if name in PATH_KNOBS]) if names]


def _field(run: str, name: str, bound: KnobBound, allowed: bool) -> None:
    label, key, off = f"{name}: {edits.accepted(bound)}", _key(run, name), not allowed
    if bound.kind == "choice":
        st.selectbox(label, bound.words, key=key, help=bound.help, disabled=off)
    else:
        st.text_input(label, key=key, help=bound.help, disabled=off, placeholder=edits.example(bound) or None)


def filled_on(run: str) -> int | None:
    """The generation on which the viewer's form was filled."""
    base: KnobsView | None = st.session_state.get(_key(run, "base:"))
    return base.generation if base else None


def _key(run: str, name: str) -> str:
    return f"knob:{run}:{name}"


def _prepare(knobs: KnobsView) -> None:
    """Fills the fields once; later runs of the script leave what was typed alone."""
    base = st.session_state.get(_key(knobs.run, "base:"))
    untouched = base is not None and base.generation < knobs.generation and not _draft(knobs.run).edited()
    missing = any(_key(knobs.run, name) not in st.session_state for name in knobs.bounds)
    if base is None or untouched or missing:
        _fill(knobs)


def _fill(knobs: KnobsView, fields: dict[str, str] | None = None) -> None:
    st.session_state[_key(knobs.run, "base:")] = knobs
    for name in knobs.bounds:
        value = units.knob(name, knobs.desired.get(name)) if fields is None else fields[name]
        st.session_state[_key(knobs.run, name)] = value


def _draft(run: str) -> edits.Draft:
    base: KnobsView = st.session_state[_key(run, "base:")]
    fields = {
        name: str(st.session_state.get(_key(run, name), units.knob(name, base.desired.get(name))))
        for name in base.bounds
    }
    return edits.Draft(generation=base.generation, desired=dict(base.desired), fields=fields)


def _parsed(run: str, knobs: KnobsView) -> edits.Parsed | None:
    """What the form asks for; None, with a notice, when there is nothing to send."""
    parsed = edits.parse(_draft(run), knobs.bounds)
    if parsed.errors:
        _notice(run, "error", " ".join(parsed.errors.values()))
        return None
    if not parsed.changes:
        _notice(run, "info", "Nothing to set: every field is as the run has it.")
        return None
    return parsed


def _set(url: str, knobs: KnobsView) -> None:
    run = knobs.run
    parsed, draft = _parsed(run, knobs), _draft(run)
    if parsed is None:
        return
    reason = str(st.session_state.get(_key(run, "reason:"), "")).strip()
    try:
        with DaemonClient(url, _token()) as client:
            made = client.set_knobs(run, parsed.changes, generation=draft.generation, reason=reason, wait=WAIT_SECONDS)
            now = client.knobs(run)
    except StaleKnobs:
        _conflict(url, run, draft)
        return
    except (DaemonError, KnobError) as error:
        _notice(run, "error", _sentence(error, url))
        return
    good, sentence = edits.outcome(made)
    _notice(run, "success" if good else "error", sentence)
    pending = made.state == "proposed"
    shown = now.model_copy(update={"desired": made.knobs}) if pending else now
    _fill(shown, None if good else dict(draft.fields))
    if good:
        st.session_state[_key(run, "reason:")] = ""


def _preview(url: str, knobs: KnobsView) -> None:
    run = knobs.run
    parsed, draft = _parsed(run, knobs), _draft(run)
    if parsed is None:
        return
    try:
        with DaemonClient(url, _token()) as client:
            preview = client.preview_knobs(run, parsed.changes, draft.generation)
    except StaleKnobs:
        _conflict(url, run, draft)
        return
    except (DaemonError, KnobError) as error:
        _notice(run, "error", _sentence(error, url))
        return
    before, after = preview.predicted_update_seconds_before, preview.predicted_update_seconds_after
    figures = preview.no_prediction
    if before is not None and after is not None:
        figures = f"Predicted update: {units.seconds(before)} → {units.seconds(after)}"
        figures += f" ({(after - before) / before:+.0%})." if before > 0 else "."
        figures += _details(preview)
    _notice(
        run, "info", f"Preview of {edits.describe(preview.changed, preview.before)}. {figures} Nothing was changed."
    )


def _details(preview: KnobPreview) -> str:
    """Stalls, memory and what the machine could do at best, as sentences."""
    then = preview.predicted_after
    if then is None:
        return ""
    causes = sorted(then.stalls.items(), key=lambda cause: -cause[1])
    waits = ", ".join(f"{cause} {units.seconds(seconds)}" for cause, seconds in causes if seconds > 0)
    told = f" Then stalled by {waits}." if waits else " Then without a stall."
    told += f" No faster than {units.seconds(then.bound_seconds)} ({then.bound_by})."
    told += f" Host memory {show_size(sum(then.host_memory_bytes.values()))}."
    if preview.error_ratio is not None:
        told += f" Predictions of this run are off by {preview.error_ratio:.0%} now."
    return told


def _reset(url: str, run: str) -> None:
    try:
        _fill(feed.fresh_knobs(url, run)[0])
    except DaemonError as error:
        _notice(run, "error", _sentence(error, url))


def _conflict(url: str, run: str, draft: edits.Draft) -> None:
    try:
        now, generations = feed.fresh_knobs(url, run)
    except DaemonError as error:
        _notice(run, "error", _sentence(error, url))
        return
    _notice(run, "warning", edits.conflict(draft, generations))
    _fill(now, dict(edits.rebase(draft, now).fields))


def _token() -> str:
    return str(st.session_state.get(TOKEN, "")).strip()


def _sentence(error: Exception, url: str) -> str:
    if isinstance(error, NotAuthorized):
        return f"Not set: the daemon does not accept this operate token. Your edit is kept. ({error})"
    if isinstance(error, DaemonUnreachable):
        return f"It is not known whether this was set: {error} Your edit is kept."
    return f"Not set: {error or f'the daemon at {url} answered with an error.'} Your edit is kept."


def _notice(run: str, kind: str, sentence: str) -> None:
    st.session_state[_key(run, "notice:")] = (kind, sentence)


def _show_notice(run: str) -> None:
    """What came of the last press of a button; it goes with the next one."""
    found: tuple[str, str] | None = st.session_state.get(_key(run, "notice:"))
    if found:
        draw: Any = _NOTICE[found[0]]
        draw(_plain(found[1]))


def _plain(text: str) -> str:
    """Text that markdown leaves as it is."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()<>#+-!|~$:" else c for c in text)
