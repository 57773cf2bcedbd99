"""The state machine of generations, as a table: what happened, and what was decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.daemon.decisions.canary import Canary, StepOfAllRanks
from tidegate.daemon.decisions.generations import (
    NO_RANKS,
    ControlEvent,
    ControlState,
    Generation,
    NewProposal,
    RankApplied,
    RankJoined,
    RankLeft,
    Tick,
    TrialJudged,
    VoteCast,
    decide,
)
from tidegate.wire.base import KnobChanges
from tidegate.wire.canary import CanaryState

START = Generation(number=0, state="committed", knobs={"stride": 2.0}, changes={}, author="start", created_at=0.0)
DEADLINE = 10.0


def control(*ranks: int) -> ControlState:
    return ControlState(newest=0, committed=START, present=frozenset(ranks))


TRIAL = Canary(base=0, steps=5, min_effect=0.1, min_headroom=0.05, before=(StepOfAllRanks(1.0, 0.5, 0.5),))


def propose(
    stride: float = 3.0, *, commit: bool = False, trial: bool = False, restores: int | None = None
) -> NewProposal:
    knobs: KnobChanges = {"stride": stride}
    return NewProposal(
        knobs=knobs,
        changes=knobs,
        author="ada",
        reason="",
        at=1.0,
        deadline=DEADLINE,
        commit=commit,
        canary=TRIAL if trial else None,
        restores=restores,
    )


def judged(state: CanaryState, generation: int = 1) -> TrialJudged:
    return TrialJudged(generation, replace(TRIAL, state=state, verdict="as measured"))


def yes(rank: int, generation: int = 1) -> VoteCast:
    return VoteCast(rank, generation, True, "", 2.0)


def no(rank: int, reason: str = "it does not fit") -> VoteCast:
    return VoteCast(rank, 1, False, reason, 2.0)


LATE = Tick(DEADLINE, 3.0)
EARLY = Tick(DEADLINE - 0.1, 3.0)

TABLE: list[tuple[str, tuple[int, ...], list[ControlEvent], list[str]]] = [
    ("no rank: at once", (), [propose()], ["1 proposed", "1 committed"]),
    ("one rank waits", (0,), [propose()], ["1 proposed"]),
    ("one rank says yes", (0,), [propose(), yes(0)], ["1 proposed", "1 voted", "1 committed"]),
    ("one of two is not enough", (0, 1), [propose(), yes(0)], ["1 proposed", "1 voted"]),
    ("all of two", (0, 1), [propose(), yes(1), yes(0)], ["1 proposed", "1 voted", "1 voted", "1 committed"]),
    ("one no is enough", (0, 1), [propose(), no(1)], ["1 proposed", "1 voted", "1 refused"]),
    ("a yes taken back", (0, 1), [propose(), yes(0), no(0)], ["1 proposed", "1 voted", "1 voted", "1 refused"]),
    ("a vote on what is decided", (0,), [propose(), no(0), yes(0)], ["1 proposed", "1 voted", "1 refused"]),
    ("a vote on another generation", (0,), [propose(), yes(0, 2)], ["1 proposed"]),
    ("a vote of nobody", (0,), [propose(), yes(7)], ["1 proposed"]),
    ("time is not up", (0,), [propose(), EARLY], ["1 proposed"]),
    ("silence", (0,), [propose(), LATE], ["1 proposed", "1 aborted"]),
    ("half silence", (0, 1), [propose(), yes(0), LATE], ["1 proposed", "1 voted", "1 aborted"]),
    ("a yes too late", (0,), [propose(), LATE, yes(0)], ["1 proposed", "1 aborted"]),
    ("time alone does nothing", (0,), [LATE], []),
    ("superseded", (0,), [propose(), propose(4)], ["1 proposed", "1 superseded", "2 proposed"]),
    (
        "the older vote does not count",
        (0,),
        [propose(), propose(4), yes(0, 1), yes(0, 2)],
        ["1 proposed", "1 superseded", "2 proposed", "2 voted", "2 committed"],
    ),
    ("the silent one leaves", (0, 1), [propose(), yes(0), RankLeft(1, 3.0)], ["1 proposed", "1 voted", "1 committed"]),
    ("the last one leaves", (0,), [propose(), RankLeft(0, 3.0)], ["1 proposed", "1 committed"]),
    ("one who joins must vote", (0,), [propose(), RankJoined(1, True), yes(0)], ["1 proposed", "1 voted"]),
    (
        "a new agent must vote again",
        (0, 1),
        [propose(), yes(0), RankJoined(0, True), yes(1)],
        ["1 proposed"] + ["1 voted"] * 2,
    ),
    (
        "the same agent need not",
        (0, 1),
        [propose(), yes(0), RankJoined(0, False), yes(1)],
        ["1 proposed", "1 voted", "1 voted", "1 committed"],
    ),
    ("reset skips the vote", (0,), [propose(commit=True)], ["1 proposed", "1 committed"]),
    (
        "reset wins over what is pending",
        (0,),
        [propose(), propose(5, commit=True)],
        ["1 proposed", "1 superseded", "2 proposed", "2 committed"],
    ),
    (
        "applied by all",
        (0, 1),
        [RankApplied(0, 0, 4), RankApplied(1, 0, 4)],
        ["0 rank_applied", "0 rank_applied", "0 applied"],
    ),
    ("applied twice", (0, 1), [RankApplied(0, 0, 4), RankApplied(0, 0, 9)], ["0 rank_applied"]),
    ("applied by all who stay", (0, 1), [RankApplied(0, 0, 4), RankLeft(1, 3.0)], ["0 rank_applied", "0 applied"]),
    ("nobody stays", (0,), [RankLeft(0, 3.0)], []),
    (
        "applied too late to matter",
        (0,),
        [propose(), yes(0), RankApplied(0, 0, 7)],
        ["1 proposed", "1 voted", "1 committed"],
    ),
]


def play(state: ControlState, events: list[ControlEvent]) -> tuple[ControlState, list[str]]:
    told: list[str] = []
    for event in events:
        state, decisions = decide(state, event)
        told += [f"{d.generation.number} {d.kind}" for d in decisions]
    return state, told


@pytest.mark.parametrize(("name", "ranks", "events", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_decisions(name: str, ranks: tuple[int, ...], events: list[ControlEvent], expected: list[str]) -> None:
    assert play(control(*ranks), events)[1] == expected


PROPOSED = ["1 proposed waiting", "1 committed waiting"]
TRIALS: list[tuple[str, list[ControlEvent], list[str]]] = [
    ("kept", [judged("promoted")], ["1 promoted promoted"]),
    ("kept once", [judged("promoted"), judged("condemned")], ["1 promoted promoted"]),
    ("of another generation", [judged("promoted", 0)], []),
    ("a change while it runs", [propose(5)], ["2 proposed", "1 canary_ended superseded", "2 committed"]),
    (
        "gone back",
        [judged("condemned"), propose(2, restores=0)],
        ["1 condemned condemned", "2 proposed", "1 canary_ended rolled_back", "2 committed"],
    ),
    ("gone back by hand", [propose(2, restores=0)], ["2 proposed", "1 canary_ended rolled_back", "2 committed"]),
    (
        "changed after it was kept",
        [judged("promoted"), propose(5)],
        ["1 promoted promoted", "2 proposed", "2 committed"],
    ),
]


@pytest.mark.parametrize(("name", "events", "expected"), TRIALS, ids=[row[0] for row in TRIALS])
def test_trials(name: str, events: list[ControlEvent], expected: list[str]) -> None:
    state, told = control(), list[str]()
    for event in [propose(trial=True), *events]:
        state, decisions = decide(state, event)
        for made in decisions:
            trial = made.generation.canary
            told.append(f"{made.generation.number} {made.kind}" + (f" {trial.state}" if trial else ""))
    assert told == PROPOSED + expected


def test_a_trial_that_never_ran_has_ended() -> None:
    _, decisions = decide(decide(control(0), propose(trial=True))[0], LATE)
    trial = decisions[-1].generation.canary
    assert trial is not None
    assert (trial.state, trial.verdict) == ("superseded", "It never ran.")


def outcome(ranks: tuple[int, ...], events: list[ControlEvent]) -> str:
    state = control(*ranks)
    for event in events:
        state, decisions = decide(state, event)
    return decisions[-1].generation.outcome


def test_outcomes_name_rank_and_reason() -> None:
    assert outcome((0, 1), [propose(), no(1, "needs 9 GB of 4 GB")]) == "Rank 1 refused: needs 9 GB of 4 GB"
    assert "from ranks 1, 2 before" in outcome((0, 1, 2), [propose(), yes(0), LATE])
    assert "from rank 1 before" in outcome((0, 1), [propose(), yes(0), LATE])
    assert outcome((), [propose()]) == NO_RANKS
    assert outcome((0, 1), [propose(), yes(0), yes(1)]) == "All 2 ranks said yes."


def test_first_steps_are_kept_by_rank() -> None:
    state, _ = play(control(0, 1), [propose(), yes(0), yes(1), RankApplied(1, 1, 12), RankApplied(0, 1, 12)])
    assert dict(state.committed.applied) == {0: 12, 1: 12}
    assert state.committed.state == "applied"


RANK, NUMBER = st.integers(0, 2), st.integers(0, 6)
EVENTS = st.lists(
    st.one_of(
        st.builds(propose, st.floats(1, 9), commit=st.booleans()),
        st.builds(VoteCast, RANK, NUMBER, st.booleans(), st.just("why"), st.just(2.0)),
        st.builds(RankApplied, RANK, NUMBER, st.integers(0, 99)),
        st.builds(RankJoined, RANK, st.booleans()),
        st.builds(RankLeft, RANK, st.just(3.0)),
        st.sampled_from([EARLY, LATE]),
    ),
    max_size=40,
)
FINAL = {"applied", "refused", "aborted", "superseded"}


@given(EVENTS)
def test_never_back_to_an_older_generation(events: list[ControlEvent]) -> None:
    state, states = control(0, 1), {0: "committed"}
    for event in events:
        after, decisions = decide(state, event)
        assert after.committed.number >= state.committed.number
        assert after.newest >= state.newest
        assert after.pending is None or after.committed.number < after.pending.number == after.newest
        for decision in decisions:
            made = decision.generation
            assert states.get(made.number) not in FINAL or decision.kind == "rank_applied"
            states[made.number] = made.state
            if decision.kind == "committed" and made.outcome.startswith(("All", "The rank")):
                assert all(made.votes[rank].can for rank in state.present)
        state = after
