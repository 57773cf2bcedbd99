"""The native sums over the spans of a step, against the Python functions that they replace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tidegate.kernels.arithmetic import span_sums
from tidegate.kernels.arithmetic.span_sums import SpanTable
from tidegate.plan.ops import CONTENT_OF, LANE_OF, LINK_LANES, OpKind
from tidegate.speeds.rate_card import measured_work
from tidegate.timeline.bytes_by_phase import totals_by_phase
from tidegate.timeline.timeline import Phase, PhaseSpan, Span

# Sixty-fourths add up without rounding, so that sums can be compared exactly.
instant = st.integers(0, 900).map(lambda n: n / 64)
NAMES: tuple[Phase, ...] = ("other", "forward", "backward", "update")


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    """Spans of any kind in the order in which they began, with overlaps within a lane."""
    rows = draw(st.lists(st.tuples(st.sampled_from(list(OpKind)), instant, instant, st.integers(0, 99)), max_size=30))
    ends = sorted((min(a, b), max(a, b), kind, size) for kind, a, b, size in rows)
    return [
        Span(i, kind, LANE_OF.get(kind, f"nvme:{kind.value}"), i, low, high, size, 2 * size, CONTENT_OF.get(kind))
        for i, (low, high, kind, size) in enumerate(ends)
    ]


@st.composite
def phases(draw: st.DrawFn) -> list[PhaseSpan]:
    """Phases that follow each other; a name may come twice."""
    edges = sorted(draw(st.lists(instant, min_size=2, max_size=7, unique=True)))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=len(edges) - 1, max_size=len(edges) - 1))
    return [PhaseSpan(name, low, high) for name, low, high in zip(names, edges, edges[1:], strict=False)]


@settings(max_examples=examples(600))
@given(spans=spans(), phases=phases())
def test_copies_over_the_link_have_the_same_totals(spans: list[Span], phases: list[PhaseSpan]) -> None:
    copies = [((s.lane, str(s.content)), s) for s in spans if s.content is not None and s.lane in LINK_LANES]
    expected = {
        (*channel, phase): (total.nbytes, pytest.approx(total.seconds))
        for (channel, phase), total in totals_by_phase(copies, phases).items()
    }
    totals = span_sums.link_totals(SpanTable(spans), tuple(phases))
    found = {key: (total.nbytes, total.seconds) for key, total in totals.items()}
    assert found == expected


@settings(max_examples=examples(600))
@given(spans=spans())
def test_the_work_of_a_step_is_the_same_to_the_last_bit(spans: list[Span]) -> None:
    assert span_sums.measured_work(SpanTable(spans)) == measured_work(spans)


@settings(max_examples=examples(300))
@given(spans=spans(), repeats=st.lists(st.integers(0, 4), max_size=30), skipped=st.integers(0, 9))
def test_bytes_of_repeated_ops_count_once(spans: list[Span], repeats: list[int], skipped: int) -> None:
    ran = [span._replace(op=op, kind=OpKind.GRAD_D2H) for span, op in zip(spans, repeats, strict=False)] + spans
    copies = [(span.op, span.nbytes) for span in ran[skipped:] if span.kind is OpKind.GRAD_D2H]
    once = sum(dict(copies).values())
    again = sum(nbytes for _, nbytes in copies) - once
    assert span_sums.bytes_of_kind(SpanTable(ran), OpKind.GRAD_D2H, skipped) == (once, again)


def test_what_is_no_span_is_refused() -> None:
    for bad in ((1, 2), "span", None):
        with pytest.raises(TypeError, match="Span"):
            SpanTable((bad,))  # type: ignore[arg-type]
    span = Span(0, OpKind.FETCH, "nvme:read", 0, 0.0, 1.0, 8, 2)
    for change in ({"op": "0"}, {"nbytes": 1.5}, {"start": None}, {"numel": 1 << 80}):
        with pytest.raises(TypeError, match="Span"):
            SpanTable((span._replace(**change),))
    with pytest.raises(TypeError):
        SpanTable(None)  # type: ignore[arg-type]


def test_the_link_has_phases() -> None:
    with pytest.raises(ValueError, match="phases is empty"):
        span_sums.link_totals(SpanTable(()), ())
