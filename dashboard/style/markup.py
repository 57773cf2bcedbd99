"""HTML snippets, escaping for Markdown and charts, and the style sheet. Text from outside is escaped here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from tidegate.dashboard.style import palette

NO_BREAK = "\u00a0"
_MARKDOWN = re.compile(r"[\\`*_{}\[\]()<>#!|~$:]|^[+-]", re.MULTILINE)
"""Special characters of Markdown; `+` and `-` at the beginning of a line would make a list or a heading."""
_ADDRESS = re.compile(r"(?<=www)(?=\.)|(?<=:)(?=//)|(?=@)|(?<=:)(?=[\w+-]+(?:/[\w+-]+)?:)", re.IGNORECASE)
"""Pattern for the places at which `plain` inserts an invisible character into web addresses and icon names. Without it,
Markdown makes links of `www.`, `http://` and `name@host`, and pictures of `:home:` and `:material/home:`, even if the
text is escaped."""
_JOINER = "\u2060"
"""Word joiner: the invisible Unicode character that `plain` inserts into web addresses and icon names. It has no width
and allows no line break."""

STYLE = """
<style>
.stMainBlockContainer { padding: 0.9rem 1.6rem 2rem; max-width: 1800px; }
.stApp [data-testid="stHeader"] { display: none; }
.stApp [data-testid="stVerticalBlock"] { gap: 0.45rem; }
.stApp .stHtml { line-height: 1.35; }
.stApp [data-stale="true"] { opacity: 1 !important; transition: none !important; }
.st-key-gantt { min-height: 330px; }
.st-key-memory { min-height: 360px; }
.st-key-phase_history { min-height: 214px; }
:is(.st-key-stalls, .st-key-link_bytes, .st-key-cpu, .st-key-loss, .st-key-grad_norm, .st-key-tokens) {
  min-height: 170px; }
.tg-muted { opacity: 0.66; }
.tg-head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0.75rem; font-size: 0.84rem; }
.stApp .st-key-bar { border-bottom: 1px solid color-mix(in srgb, currentColor 14%, transparent); gap: 0.2rem;
  padding-bottom: 0.15rem; flex-wrap: wrap; }
.stApp .st-key-links { gap: 0.2rem; }
.stApp .st-key-pickers [data-testid="stSelectbox"] div:has(> input),
.stApp .st-key-pickers [data-baseweb="select"] > div { min-height: 1.9rem; height: 1.9rem; }
.tg-run { font-size: 1.3rem; font-weight: 650; letter-spacing: -0.01em; overflow-wrap: anywhere; }
.tg-pill { border: 1px solid; border-radius: 999px; padding: 0 0.6rem; font-size: 0.78rem; font-weight: 600; }
.tg-verdict { font-size: 1.02rem; margin: 0.1rem 0 0.5rem; }
.tg-banner { border-left: 4px solid; padding: 0.2rem 0.7rem; border-radius: 3px; font-size: 0.82rem;
  background: color-mix(in srgb, currentColor 7%, transparent); }
.tg-kpis { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 0.5rem; }
.tg-kpi { border: 1px solid color-mix(in srgb, currentColor 16%, transparent); border-radius: 6px;
  padding: 0.3rem 0.65rem; min-width: 0; }
.tg-kpi b { display: block; font-size: 1.12rem; font-weight: 620; font-variant-numeric: tabular-nums;
  white-space: nowrap; line-height: 1.25; }
.tg-kpi span { font-size: 0.72rem; opacity: 0.7; white-space: nowrap; }
.tg-title { font-size: 0.8rem; font-weight: 650; margin-top: 0.15rem; }
.tg-title span { font-weight: 400; opacity: 0.66; margin-left: 0.4rem; }
.tg-scroll { overflow-x: auto; }
table.tg { border-collapse: collapse; width: 100%; font-size: 0.78rem; font-variant-numeric: tabular-nums; }
.stApp table.tg th, .stApp table.tg td { border: 0; padding: 0.16rem 0.45rem 0.16rem 0; text-align: right;
  border-bottom: 1px solid color-mix(in srgb, currentColor 10%, transparent); white-space: nowrap; }
.stApp table.tg th { font-weight: 500; opacity: 0.62; }
.stApp table.tg .l { text-align: left; }
.stApp table.tg th:last-child, .stApp table.tg td:last-child { padding-right: 2px; }
.stApp table.tg .w { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
.tg-dot { display: inline-block; width: 0.68em; height: 0.68em; border-radius: 2px; margin-right: 0.45em; }
.tg-bar { display: inline-block; width: 2.6rem; height: 0.5em; border-radius: 2px; margin-right: 0.4em;
  background: color-mix(in srgb, currentColor 12%, transparent); overflow: hidden; vertical-align: 0.05em; }
.tg-num { display: inline-block; min-width: 2.7em; }
.stApp [data-testid="stButtonGroup"] button { min-height: 1.7rem; height: 1.7rem; padding: 0 0.6rem; }
.stApp [data-testid="stButtonGroup"] button p { font-size: 0.8rem; }
.tg-bar i { display: block; height: 100%; }
.tg-chain { font-size: 0.82rem; display: flex; flex-wrap: wrap; gap: 0.4rem; align-items: center; }
.tg-chip { border-radius: 4px; padding: 0.05rem 0.5rem;
  border: 1px solid color-mix(in srgb, currentColor 30%, transparent); }
.tg-next { border-left: 4px solid; padding: 0.35rem 0.8rem; border-radius: 3px; font-size: 0.95rem;
  background: color-mix(in srgb, currentColor 7%, transparent); }
.stApp .st-key-next > [data-testid="stElementContainer"]:first-child { flex: 1 1 30rem; }
.tg-pace { display: flex; align-items: baseline; gap: 0.6rem; flex-wrap: wrap; }
.tg-pace b { font-size: 1.25rem; font-weight: 640; font-variant-numeric: tabular-nums; }
.tg-pace span { font-size: 0.74rem; opacity: 0.7; font-variant-numeric: tabular-nums; }
.stApp .st-key-cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(23rem, 1fr)); gap: 0.6rem; }
.stApp .st-key-cards > * { width: auto; }
.stApp [class*="st-key-card-head-"] [data-testid="stPageLink"] a { padding: 0; }
[class*="st-key-card-"] .tg-verdict { font-size: 0.84rem; min-height: 2.3em; margin: 0.15rem 0 0.3rem; }
[class*="st-key-card-head-"] { justify-content: space-between; flex-wrap: nowrap; }
[class*="st-key-card-head-"] [data-testid="stPageLink"] p { font-weight: 650; overflow-wrap: anywhere; }
.stApp [class*="st-key-card-"] [data-testid="stVerticalBlock"] { gap: 0.2rem; }
.tg-stack { display: flex; gap: 1px; height: 0.7rem; border-radius: 3px; overflow: hidden; }
.tg-stack i { display: block; height: 100%; }
.tg-legend { display: flex; flex-wrap: wrap; gap: 0.1rem 0.8rem; font-size: 0.72rem; margin-top: 0.25rem; }
.tg-legend span { white-space: nowrap; }
.tg-chip.off { opacity: 0.45; border-style: dashed; }
</style>
"""


def plain(text: str) -> str:
    """The text escaped for Markdown (labels, captions, messages), so that it is shown unchanged."""
    return _MARKDOWN.sub(r"\\\g<0>", _ADDRESS.sub(_JOINER, text))


def chart(text: str) -> str:
    """The text escaped for a chart. Plotly would interpret tags and links, and replace `%{…}`."""
    return escape(text, quote=False).replace("%{", "%&#123;")


def head(run: str, liveness: str, details: Sequence[str]) -> str:
    rest = " · ".join(escape(detail) for detail in details)
    name = f'<span class="tg-run">{escape(run)}</span>'
    return f'<div class="tg-head">{name}{pill(liveness)}<span class="tg-muted">{rest}</span></div>'


def pill(liveness: str) -> str:
    color = palette.LIVENESS.get(liveness, palette.GREY)
    return f'<span class="tg-pill" style="color:{color};border-color:{color}">{escape(liveness)}</span>'


def advice(what: str, sentence: str, liveness: str) -> str:
    """A suggested action as HTML: `what` in bold, then the sentence, in a frame with the colour of `liveness`."""
    color = palette.LIVENESS[liveness]
    return f'<div class="tg-next" style="border-color:{color}"><b>{escape(what)}</b> {escape(sentence)}</div>'


def pace(figure: str, details: Sequence[str], hint: str = "") -> str:
    """The first line of a run's card, as HTML: `figure` (the time per step) in large type, then `details` in small
    type. `hint` is the hover text."""
    rest = " · ".join(escape(detail) for detail in details)
    return f'<div class="tg-pace" title="{escape(hint)}"><b>{escape(figure)}</b><span>{rest}</span></div>'


def stack(parts: Iterable[tuple[str, float, str]]) -> str:
    """A stacked bar of shares with a legend; each part has a text, a share and a colour."""
    found = [(escape(text), max(0.0, share), color) for text, share, color in parts]
    filled = "".join(
        f'<i style="width:{share * 100:.1f}%;background:{color}" title="{text}"></i>' for text, share, color in found
    )
    words = "".join(f"<span>{dot_of(color)}{text}</span>" for text, _, color in found)
    return f'<div class="tg-stack">{filled}</div><div class="tg-legend">{words}</div>'


def verdict(sentence: str) -> str:
    """The HTML paragraph for a sentence that sums up a run or a page (the verdict). A number and its percent sign stay
    in one line."""
    return f'<div class="tg-verdict">{escape(sentence).replace(" %", NO_BREAK + "%")}</div>'


def banner(sentence: str, color: str = palette.LIVENESS["lost"]) -> str:
    return f'<div class="tg-banner" style="border-color:{color}">{escape(sentence)}</div>'


def kpis(items: Iterable[tuple[str, str, str]]) -> str:
    """Key figures as HTML; each has a name, a figure and a footnote."""
    cells = (
        f'<div class="tg-kpi"><span>{escape(name)}</span><b>{escape(figure)}</b>'
        f"<span>{escape(note) or '&nbsp;'}</span></div>"
        for name, figure, note in items
    )
    return f'<div class="tg-kpis">{"".join(cells)}</div>'


def title(text: str, note: str = "") -> str:
    return f'<div class="tg-title">{escape(text)}<span>{escape(note)}</span></div>'


class Raw(str):
    """A table cell that is HTML already, and is not escaped again."""

    __slots__ = ()


def dot_of(color: str) -> str:
    return f'<span class="tg-dot" style="background:{color}"></span>'


def dot(text: str, color: str) -> Raw:
    return Raw(f"{dot_of(color)}{escape(text)}")


def bar(share: float, text: str, color: str) -> Raw:
    width = max(0.0, min(1.0, share)) * 100
    filled = f'<span class="tg-bar"><i style="width:{width:.0f}%;background:{color}"></i></span>'
    return Raw(f'{filled}<span class="tg-num">{escape(text)}</span>')


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,), wide: Sequence[int] = ()
) -> str:
    """A table as HTML. Columns in `left` are aligned left, columns in `wide` may break their lines."""

    def css(index: int) -> str:
        return " ".join(name for name, chosen in (("l", left), ("w", wide)) if index in chosen)

    header = "".join(f'<th class="{css(i)}">{escape(name)}</th>' for i, name in enumerate(columns))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{css(i)}">{c if isinstance(c, Raw) else escape(c)}</td>' for i, c in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="tg-scroll"><table class="tg"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
    )


Station = tuple[str, bool, str | None]
"""One stage of the progress of a change of knobs, such as `committed`, as a tuple: text, whether the stage was reached,
and the colour of the text and frame (None: the default colour)."""


def chain(stations: Sequence[Station], more: str = "") -> str:
    """The progress of a change of knobs as HTML: the stages (`Station`) in a row with arrows between them, and the text
    `more` at the end."""
    chips = (
        f'<span class="tg-chip{"" if reached else " off"}"'
        f'{f""" style="color:{color};border-color:{color}" """ if color else ""}>{escape(text)}</span>'
        for text, reached, color in stations
    )
    rest = f"<span>{escape(more)}</span>" if more else ""
    return f'<div class="tg-chain">{" → ".join(chips)}{rest}</div>'
