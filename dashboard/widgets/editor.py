"""Editor of the knobs: a field for each knob, reason, trial and buttons. It does not refresh by itself, because a
refresh could discard edits.

Its buttons do not run the whole page either. If the viewer edited a field right after such a run, Streamlit would drop
the messages of the editor that it has not sent yet, and the browser would then empty all fields.
"""

from __future__ import annotations

from typing import Any, Final

import streamlit as st

from tidegate.client.discovery import token_dir
from tidegate.dashboard.data import knob_edits
from tidegate.dashboard.session import actions, edit_session, links
from tidegate.dashboard.session.edit_session import EditState
from tidegate.dashboard.session.page_context import PageContext, in_fragment
from tidegate.dashboard.style import markup, snippets
from tidegate.wire.canary import MAX_CANARY_STEPS
from tidegate.wire.knobs import KnobBound, KnobsView

UNCHANGED: Final = "as it is"
_NOTICE: Final = {"error": st.error, "warning": st.warning, "success": st.success, "info": st.info}


@in_fragment
def editor(context: PageContext, knobs: KnobsView) -> None:
    """Draws the token field, a field for each knob, and the buttons. The editor is drawn again only when the user
    changes a field or presses a button."""
    at, allowed = edit_session.state_of(context.run), bool(edit_session.token())
    at.begin(knobs)
    st.html(markup.title("Turn the knobs", "all ranks apply a change between the same two steps"))
    _access(context, knobs, allowed)
    parsed = knob_edits.parse(at.draft, knobs.bounds)
    for name, bound in knobs.bounds.items():
        _field(at, context.run, name, bound, allowed, parsed.errors.get(name, ""))
    _buttons(context, knobs, at, allowed)
    _notice(at)


def _access(context: PageContext, knobs: KnobsView, allowed: bool) -> None:
    """Draws the field for the operate token, or a note that there is a token."""
    key = f"token:{context.run}"
    with st.container(horizontal=True, vertical_alignment="center", key="access"):
        if allowed:
            st.caption("Changes are made with your operate token, which this page keeps for you.")
            st.button("Forget it", key="forget_token", type="tertiary", on_click=edit_session.forget_token)
            return
        st.text_input(
            "Operate token", type="password", key=key, autocomplete="off", label_visibility="collapsed",
            placeholder="Operate token, to change anything", on_change=_take_token, args=(context.url, knobs, key),
            help="It stays in this session.",
        )  # fmt: skip
        st.caption("Read-only")
    st.caption(f"`tidegate dashboard --link` prints a link that opens this page for changes. {_where_it_is()}")


def _where_it_is() -> str:
    """A sentence in Markdown that says in which file the operate token is."""
    file = token_dir() / "operate.token"
    if file.is_file():
        return f"The operate token is in `{file}`."
    return "The daemon writes the operate token to `operate.token` in its state directory."


def _take_token(url: str, knobs: KnobsView, key: str) -> None:
    actions.keep_token(url, knobs, str(st.session_state[key]))


def _field(at: EditState, run: str, name: str, bound: KnobBound, allowed: bool, problem: str) -> None:
    """Draws a knob's name, bounds and field. An error replaces the bounds, so that the layout does not change."""
    key = f"knob:{run}:{name}:{at.filling}"
    left, right = st.columns([11, 9], gap="small", vertical_alignment="center")
    left.html(snippets.knob_label(name, problem or knob_edits.accepted(bound), bound.help, wrong=bool(problem)))
    links.field_key(key, at.edits.get(name) or (None if bound.kind == "choice" else ""))
    more: dict[str, Any] = {
        "key": key, "disabled": not allowed, "label_visibility": "collapsed", "on_change": _on_field_change,
        "args": (run, name, key, at.filling),
    }  # fmt: skip
    if bound.kind == "choice":
        right.selectbox(name, bound.words, index=None, placeholder=UNCHANGED, **more)
    else:
        example = knob_edits.example(bound)
        right.text_input(name, placeholder=f"{UNCHANGED}, or {example}" if example else UNCHANGED, **more)


def _on_field_change(run: str, name: str, key: str, filling: int) -> None:
    at = edit_session.state_of(run)
    if at.filling == filling:
        at.edits[name], at.notice = str(st.session_state[key] or ""), None


def _buttons(context: PageContext, knobs: KnobsView, at: EditState, allowed: bool) -> None:
    run, off = context.run, not allowed
    key = links.field_key(f"reason:{run}:{at.filling}", at.reason)
    st.text_input(
        "Reason", key=key, max_chars=500, disabled=off, label_visibility="collapsed",
        placeholder="Reason, for the audit log", on_change=_on_reason_change, args=(run, key, at.filling),
    )  # fmt: skip
    with st.container(horizontal=True, vertical_alignment="center", key="trial"):
        st.checkbox(
            "On trial, for", key=links.field_key(f"trial:{run}", at.trial), disabled=off, on_change=_on_trial_change,
            args=(run,),
            help="A canary: kept only if the steps with it are no worse than those before; else the knobs before come "
            "back by themselves.",
        )  # fmt: skip
        st.number_input(
            "Steps on trial", 5, MAX_CANARY_STEPS, step=5, label_visibility="collapsed",
            key=links.field_key(f"trial_steps:{run}", at.trial_steps), disabled=off, on_change=_on_trial_change,
            args=(run,), width=120,
        )  # fmt: skip
        st.caption("steps")
    with st.container(horizontal=True, key="bar_tune"):
        sent = (context.url, run, knobs.bounds)
        st.button("Set", key="set", type="primary", disabled=off, on_click=actions.set_knobs, args=sent)
        st.button("Preview", key="preview", disabled=off, on_click=actions.preview, args=sent)
        st.button("Discard", key="discard", disabled=off, on_click=_discard, args=(run, knobs))


def _on_reason_change(run: str, key: str, filling: int) -> None:
    at = edit_session.state_of(run)
    if at.filling == filling:
        at.reason = str(st.session_state[key])


def _on_trial_change(run: str) -> None:
    at = edit_session.state_of(run)
    at.trial, at.trial_steps = bool(st.session_state[f"trial:{run}"]), int(st.session_state[f"trial_steps:{run}"])


def _discard(run: str, knobs: KnobsView) -> None:
    """Discards the user's edits: empties the fields of knobs and the notice below them."""
    at = edit_session.state_of(run)
    at.clear()
    at.notice = None
    at.base_on(knobs)


def _notice(at: EditState) -> None:
    """Draws the result of the last action; the next edit removes it."""
    if at.notice:
        tone, sentence = at.notice
        draw: Any = _NOTICE[tone]
        draw(markup.plain(sentence))
