"""The verdict on a step: what it names, with which figures, and which knob it says to turn."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.knobs.knobs import SPECS
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.timeline.verdict import NO_KNOB, REMEDIES, UpdateFigures, remedy_for, verdict

TWO = EffectiveKnobs(2.0, 0.0)


def figures(stalls: dict[str, float], **more: Any) -> UpdateFigures:
    settings: dict[str, Any] = {"step_seconds": 4.0, "update_seconds": 1.0, "updated": {"cpu": 3, "device": 1}}
    return UpdateFigures(**{**settings, "stalls": stalls, **more})


PATHS = {
    "paths": ("nvme", "pfs"),
    "lanes": {"nvme:read": (2_000_000_000, 0.5), "nvme:write": (1, 0.4), "pfs:read": (1, 0.2), "pfs:write": (1, 0.2)},
    "ceilings": {"nvme:read": 6e9},
}


@pytest.mark.parametrize(
    ("what", "step", "knobs", "expected"),
    [
        ("a link", figures({"h2d": 0.4, "cpu": 0.1}, lanes={"h2d": (10**9, 0.5)}), TWO,
         "the update took 1 s, 25% of the step; it waited 40% of it for h2d, which moved 2 GB/s; "
         "raise stride: fewer subgroups cross the link"),
        ("a link with nothing staged", figures({"d2h": 0.4}), EffectiveKnobs("off", 0.2), "raise static_ratio"),
        ("…nor anything left to keep", figures({"d2h": 0.4}), EffectiveKnobs("off", 1.0), "40% of it for d2h"),
        ("a path", figures({"nvme:read": 0.3}, **PATHS), TWO,
         "it waited 30% of it for nvme:read, which moved 4 GB/s of 6 GB/s; raise host_cache, or add a path"),
        ("paths divided by hand", figures({"nvme:read": 0.3}, **PATHS), EffectiveKnobs(2.0, 0.0, (("nvme", 3.0),)),
         "set tier_split to auto: some paths are done long before others"),
        ("another process", figures({"lock": 0.3}, **PATHS), TWO, "raise host_cache: other processes"),
        ("another rank", figures({"collective": 0.3}), TWO, "another rank holds the update up"),
        ("the agent", figures({"dispatch": 0.3}), TWO, "it waited 30% of it for dispatch"),
        ("nothing", figures({"h2d": 0.01}), EffectiveKnobs(4.0, 0.0),
         "hardly anything held it up, and the device updated 25% of the parameters; lower stride (4.0 now)"),
        ("nothing, but the link is full", figures({}, lanes={"d2h": (1, 0.9)}), TWO,
         "the device updated 25% of the parameters"),
        ("nothing, and the CPU rests", figures({}, updated={"device": 4}), EffectiveKnobs(1.0, 0.0),
         "raise stride: the CPU"),
        ("no update", figures({}, update_seconds=0.0), TWO, "no update yet"),
    ],
)  # fmt: skip
def test_it_names_the_cause_and_the_knob(what: str, step: UpdateFigures, knobs: EffectiveKnobs, expected: str) -> None:
    said = verdict(step, knobs)
    assert expected in said
    assert ("; raise" in said or "; lower" in said or "; set" in said) == any(
        word in expected for word in ("raise", "lower", "set tier")
    ), "where no knob would help, none is named"


@pytest.mark.parametrize(
    ("cause", "knob"),
    [
        ("h2d", "stride"), ("d2h", "stride"), ("cpu", "stride"), ("device", "stride"), ("nvme:write", "tier_split"),
        ("lock", "host_cache"), ("collective", NO_KNOB), ("dispatch", NO_KNOB), ("device memory", "static_ratio"),
    ],
)  # fmt: skip
def test_the_knob_of_a_cause_is_known_without_figures(cause: str, knob: str) -> None:
    found = remedy_for(cause)
    assert found.knob == knob
    assert bool(found.words) == (cause != "dispatch")


def test_a_remedy_names_its_knob_and_no_other() -> None:
    for remedy in REMEDIES:
        assert remedy.knob in (*SPECS, NO_KNOB)
        assert [name for name in SPECS if name in remedy.words.split(":")[0].replace("knobs.stride", "")] == (
            [] if remedy.knob == NO_KNOB else [remedy.knob]
        )


def test_without_knobs_it_names_none() -> None:
    assert verdict(figures({"h2d": 0.4})) == "the update took 1 s, 25% of the step; it waited 40% of it for h2d"


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ({"recopied": 1.0},
         "; 100% of the gradients were copied again, because something changed them in place after the backward: "
         "clip with the optimizer's max_grad_norm instead of clip_grad_norm_"),
        ({"recopied": 0.49}, ""),
        ({"first_gradient": 0.9},
         "; no gradient came before 90% of the backward had passed, too late to be copied beside it: "
         "where torch.compile has the whole model, compile its blocks instead"),
        ({"first_gradient": 0.7}, ""),
        ({"together": 0.95, "first_gradient": 0.9},
         "; 95% of the gradients came together, when one node of the graph had done its work, too late to be copied "
         "beside the backward: where torch.compile has the whole model, compile its blocks instead"),
        ({"together": 0.7}, ""),
    ],
)  # fmt: skip
def test_it_says_why_gradients_were_not_copied_beside_the_backward(gradients: dict[str, float], expected: str) -> None:
    step = figures({"d2h": 0.4})
    assert verdict(figures({"d2h": 0.4}, **gradients), TWO) == verdict(step, TWO) + expected
