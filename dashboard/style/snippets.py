"""HTML snippets of the pages with forms: labels of fields, rows of text. Text is escaped here."""

from __future__ import annotations

from html import escape
from typing import Final

from tidegate.dashboard.style import palette
from tidegate.dashboard.style.markup import Raw

STYLE: Final = """
<style>
.tg-knob { line-height: 1.25; }
.tg-knob b { font-size: 0.84rem; font-weight: 600; }
.tg-knob span { display: block; font-size: 0.72rem; opacity: 0.7; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.tg-knob span.wrong { opacity: 1; font-weight: 600; }
.tg-say { font-size: 0.84rem; margin: 0.1rem 0 0.25rem; display: flex; flex-wrap: wrap; gap: 0.2rem 0.9rem; }
.tg-part { padding-left: 0.9rem; opacity: 0.75; }
.tg-card { border: 1px solid color-mix(in srgb, currentColor 16%, transparent); border-left-width: 4px;
  border-radius: 6px; padding: 0.45rem 0.8rem; margin-bottom: 0.2rem; font-size: 0.84rem; }
.stApp .tg-card p { margin: 0.1rem 0 0; font-size: 0.82rem; }
.tg-none { border: 1px dashed color-mix(in srgb, currentColor 30%, transparent); border-radius: 6px;
  padding: 0.7rem 0.9rem; font-size: 0.84rem; opacity: 0.8; }
.stApp .st-key-access, .stApp .st-key-trial { gap: 0.6rem; }
.stApp .st-key-access [data-testid="stCaptionContainer"], .stApp .st-key-trial [data-testid="stCaptionContainer"] {
  margin-bottom: 0; }
.stApp .st-key-access p, .stApp .st-key-trial p { margin: 0; font-size: 0.8rem; }
.stApp :is([data-testid="stTextInputRootElement"], [data-testid="stNumberInputContainer"]) { height: 2.1rem; }
.stApp .stMain :is(.stSelectbox, .stMultiSelect) [role="group"] { height: 2.1rem; min-height: 2.1rem; }
.stApp .stMain input { font-size: 0.84rem; }
.stApp .stMain input { padding-top: 0.2rem; padding-bottom: 0.2rem; }
.stApp .stMain :is(.stButton, .stPopover) button { min-height: 2rem; height: 2rem; padding: 0 0.8rem; }
.stApp .stMain :is(.stButton, .stPopover) button p { font-size: 0.84rem; }
.stApp [class*="st-key-alert"] [data-testid="stPageLink"] a { border: 1px solid; border-radius: 8px;
  justify-content: center; height: 2rem; width: 100%; border-color: color-mix(in srgb, currentColor 20%, transparent); }
.stApp [class*="st-key-alert"] [data-testid="stPageLink"] { width: 100%; }
.stApp [class*="st-key-alert"] [data-testid="stPageLink"] p { font-size: 0.84rem; }
[data-testid="stPopoverBody"] h1 { font-size: 1.15rem; padding: 0.2rem 0; }
[data-testid="stPopoverBody"] h2 { font-size: 0.98rem; padding: 0.3rem 0 0.1rem; }
[data-testid="stPopoverBody"] :is(p, li) { font-size: 0.84rem; }
.stApp .stMain [data-testid="stAlertContainer"] { padding: 0.5rem 0.8rem; }
.stApp .stMain [data-testid="stAlertContainer"] p { font-size: 0.84rem; }
.stApp .stMain [data-testid="stWidgetLabel"] p, .stApp .stMain label p { font-size: 0.8rem; }
</style>
"""


def knob_label(name: str, note: str, hover: str, *, wrong: bool) -> str:
    """A knob's name above its note, as HTML. note: accepted values, or an error if `wrong`. hover: hover text."""
    css = f' class="wrong" style="color:{palette.LIVENESS["lost"]}"' if wrong else ""
    hint = escape(note if wrong else hover)
    return f'<div class="tg-knob" title="{hint}"><b>{escape(name)}</b><span{css}>{escape(note)}</span></div>'


def say(*parts: str) -> str:
    """A line of text as HTML, made of `parts` with space between them. Empty parts are left out."""
    spans = "".join(f"<span>{part if isinstance(part, Raw) else escape(part)}</span>" for part in parts if part)
    return f'<div class="tg-say">{spans}</div>'


def indented(text: str) -> Raw:
    """An indented row name for a table, as HTML. The indentation shows that the row is a part of the row above."""
    return Raw(f'<span class="tg-part">{escape(text)}</span>')


def colored(text: str, color: str) -> Raw:
    return Raw(f'<span style="color:{color};font-weight:600">{escape(text)}</span>')


def nothing(sentence: str) -> str:
    """A frame as HTML for a section that has no data. `sentence` says why there is none."""
    return f'<div class="tg-none">{escape(sentence)}</div>'
