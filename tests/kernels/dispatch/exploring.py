"""Random programs and random interleavings of events, with a slow reference that judges each decision of the
dispatcher.

The reference knows the rules only, and keeps its own account of what happened. It never asks the dispatcher.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate.kernels.dispatch import Dispatcher, Gate, Outcome, Program, ProgramOp

MOST_EVENTS = 2000
LANE, GATE, SUBGROUP, COPIES, USES, DEPS = range(6)


@dataclass(frozen=True)
class Case:
    """A program and its lanes. ahead: which lanes run ahead."""

    program: tuple[ProgramOp, ...]
    ahead: tuple[bool, ...]


@dataclass(frozen=True)
class Mutation:
    """A fault that is put in: what the dispatcher is given in place of the case, and of the ops to repeat."""

    case: Callable[[Case, random.Random], Case] = lambda case, _: case
    repeat: Callable[[list[int]], list[int]] = lambda ops: ops


UNCHANGED = Mutation()


def random_case(choices: random.Random) -> Case:
    """Gradient copies and updates that use them, between ops of other kinds; each op comes after its dependencies."""
    lanes = choices.randint(1, 5)
    program: list[ProgramOp] = []
    copied: dict[int, int] = {}
    for _ in range(choices.randint(1, 24)):
        place = len(program)
        kind = choices.choice(("copy", "update", "other", "other"))
        deps = set(choices.sample(range(place), min(place, choices.choice((0, 1, 1, 2, 3)))))
        lane, gate, subgroup = choices.randrange(lanes), choices.choice((Gate.NONE, Gate.STEP, Gate.STEP)), -1
        if kind == "copy":
            # Before the step opens, only ops run that nothing else reads.
            subgroup, gate, deps = len(copied), Gate.GRADIENT, set()
            copied[subgroup] = place
        elif kind == "update" and copied:
            subgroup, gate = choices.choice(list(copied)), Gate.STEP
            deps |= {copied[subgroup]} if choices.random() < 0.8 else set()
        program.append((lane, gate, subgroup, kind == "copy", subgroup >= 0 and kind == "update", sorted(deps)))
    return Case(tuple(program), tuple(choices.random() < 0.4 for _ in range(lanes)))


@dataclass
class Reference:
    """What is allowed, by the rules alone."""

    case: Case
    pending: list[deque[int]] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    """By lane: the runs in progress, the oldest first."""
    op_of: dict[int, int] = field(default_factory=dict)
    queued: set[int] = field(default_factory=set)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    """The run of each op that is issued."""
    order: list[tuple[int, int]] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    repeating: set[int] = field(default_factory=set)
    repeated: dict[int, int] = field(default_factory=dict)
    """The run that repeated the copy of a subgroup's gradient."""
    stepping: bool = False
    skipped: bool = False
    failed: int | None = None

    def __post_init__(self) -> None:
        lanes = range(len(self.case.ahead))
        self.running = [[] for _ in lanes]
        self.pending = [deque(i for i, op in enumerate(self.case.program) if op[LANE] == lane) for lane in lanes]

    def may_begin(self, lane: int) -> bool:
        if self.failed is not None or not self.pending[lane]:
            return False
        running, op = self.running[lane], self.case.program[self.pending[lane][0]]
        if running and not (self.case.ahead[lane] and len(running) == 1 and running[0] in self.queued):
            return False
        if op[USES] and op[SUBGROUP] in {self.case.program[copy][SUBGROUP] for copy in self.repeating}:
            return False
        gate = op[GATE] == Gate.NONE or self.stepping or (op[GATE] == Gate.GRADIENT and op[SUBGROUP] in self.arrived)
        return gate and all(dep in self.issued for dep in op[DEPS])

    def begun(self, lane: int, place: int, run: int, waits: Sequence[int]) -> None:
        assert self.may_begin(lane), f"op {place} must not begin"
        assert place == self.pending[lane].popleft(), f"op {place} is not the next of its lane"
        assert run not in self.op_of, "a run has its number for itself"
        op = self.case.program[place]
        expected = [self.issued[dep] for dep in op[DEPS]]
        if op[USES] and op[SUBGROUP] in self.repeated:
            expected.append(self.repeated[op[SUBGROUP]])
        assert list(waits) == expected, f"op {place} waits for {waits}, must wait for {expected}"
        self.op_of[run] = place
        self.running[lane].append(run)

    def ended(self, run: int, outcome: Outcome) -> None:
        self.outcomes[run] = outcome
        running = self.running[self.case.program[self.op_of[run]][LANE]]
        while running and running[0] in self.outcomes:
            first = running.pop(0)
            self._settle(first, self.op_of[first], self.outcomes[first])

    def _settle(self, run: int, place: int, outcome: Outcome) -> None:
        if outcome is Outcome.ISSUED:
            self.issued[place] = run
            self.order.append((place, run))
            if place in self.repeating:
                self.repeating.discard(place)
                self.repeated[self.case.program[place][SUBGROUP]] = run
        elif outcome is Outcome.SKIP:
            self.skipped = True
            self.drop()
        elif self.failed is None:
            self.failed = run

    def step(self, repeat: Sequence[int]) -> None:
        for place in sorted(repeat, reverse=True):
            if self.issued.pop(place, None) is not None:
                self.pending[self.case.program[place][LANE]].appendleft(place)
                self.repeating.add(place)
        self.stepping = True

    def drop(self) -> None:
        for lane in self.pending:
            lane.clear()

    @property
    def is_done(self) -> bool:
        return not any(self.running) and (self.failed is not None or not any(self.pending))


def explore(seed: int, mutation: Mutation = UNCHANGED) -> Reference:
    """Drives a dispatcher through one random execution of a random program. AssertionError at its first decision that
    the rules do not allow, or if it begins nothing more although ops are left."""
    choices = random.Random(seed)
    case = random_case(choices)
    given = mutation.case(case, choices)
    first_run = choices.choice((0, 1000))
    dispatcher, reference = Dispatcher(Program(list(given.program)), list(given.ahead), first_run), Reference(case)
    fails, cancels = choices.random() < 0.1, choices.random() < 0.05
    absent = set(range(len(case.program))) - {i for i, op in enumerate(case.program) if op[COPIES]}
    subgroups = [op[SUBGROUP] for i, op in enumerate(case.program) if i not in absent]
    choices.shuffle(subgroups)
    now = 0.0
    for _ in range(MOST_EVENTS):
        now += choices.random()
        runs = [run for lane in reference.running for run in lane if run not in reference.outcomes]
        events: list[str] = ["end"] * len(runs) + ["begin"] * len(case.ahead)
        events += ["queued"] * bool(runs) + ["gradient"] * bool(subgroups)
        events += ["step"] * (not reference.stepping and not (subgroups and choices.random() < 0.7))
        event = choices.choice(events)
        if event == "begin":
            # Whoever may begin does so sooner or later.
            lanes = list(range(len(case.ahead)))
            choices.shuffle(lanes)
            for lane in lanes:
                begun = dispatcher.begin(lane, now)
                if begun is not None:
                    reference.begun(lane, *begun)
                    break
                assert not reference.may_begin(lane), f"lane {lane} could begin an op"
            else:
                if reference.stepping and not runs:
                    break
        elif event == "queued":
            run = choices.choice(runs)
            dispatcher.queued(run)
            reference.queued.add(run)
        elif event == "end":
            run = choices.choice(runs)
            outcome = Outcome.ISSUED
            if fails and choices.random() < 0.1:
                outcome = choices.choice((Outcome.SKIP, Outcome.FAILED)) if reference.stepping else Outcome.FAILED
            dispatcher.ended(run, outcome, now)
            reference.ended(run, outcome)
        elif event == "gradient":
            arrived = [subgroups.pop() for _ in range(choices.randint(1, len(subgroups)))]
            dispatcher.open_gradients(arrived)
            reference.arrived.update(arrived)
        else:
            repeat = _stale(case, reference, choices)
            if repeat is not None:
                dispatcher.step(mutation.repeat(repeat))
                reference.step(repeat)
        if cancels and choices.random() < 0.02:
            dispatcher.drop()
            reference.drop()
        assert dispatcher.is_done == reference.is_done
    assert reference.is_done, "ops are left, and none of them may begin"
    assert dispatcher.issued == reference.order
    assert dispatcher.is_skipped == reference.skipped
    assert dispatcher.failed_run == reference.failed
    if reference.failed is None and not reference.skipped and not cancels:
        times = Counter(place for place, _ in reference.order)
        assert set(times) == set(range(len(case.program))), "each op was issued"
        assert all(count == 1 + (case.program[place][SUBGROUP] in reference.repeated and case.program[place][COPIES])
                   for place, count in times.items())  # fmt: skip
    return reference


def _stale(case: Case, reference: Reference, choices: random.Random) -> list[int] | None:
    """Copies that are to be repeated; None while one of those that were begun still runs, for which a step waits."""
    copies = [place for place, op in enumerate(case.program) if op[COPIES]]
    if any(reference.op_of[run] in copies for lane in reference.running for run in lane):
        return None
    return [place for place in copies if place in reference.issued and choices.random() < 0.4]


# ---- faults that the exploration must find


def _changed(case: Case, choices: random.Random, wanted: Callable[[ProgramOp], bool], change: Callable[[ProgramOp], ProgramOp]) -> Case:  # fmt: skip # noqa: E501
    found = [place for place, op in enumerate(case.program) if wanted(op)]
    if not found:
        return case
    program = list(case.program)
    place = choices.choice(found)
    program[place] = change(program[place])
    return Case(tuple(program), case.ahead)


MUTATIONS = {
    "a dependency is ignored": Mutation(lambda case, choices: _changed(
        case, choices, lambda op: bool(op[DEPS]), lambda op: (*op[:DEPS], op[DEPS][1:]),
    )),
    "the gate of the step is left open": Mutation(lambda case, choices: _changed(
        case, choices, lambda op: op[GATE] == Gate.STEP, lambda op: (op[LANE], Gate.NONE, *op[SUBGROUP:]),
    )),
    "the gate of a gradient is left open": Mutation(lambda case, choices: _changed(
        case, choices, lambda op: op[GATE] == Gate.GRADIENT, lambda op: (op[LANE], Gate.NONE, *op[SUBGROUP:]),
    )),
    "a gate is never opened": Mutation(lambda case, choices: _changed(
        case, choices, lambda op: op[GATE] == Gate.GRADIENT, lambda op: (op[LANE], Gate.STEP, *op[SUBGROUP:]),
    )),
    "a repeat is lost": Mutation(repeat=lambda ops: ops[1:]),
    "an update does not wait for the repeated copy": Mutation(lambda case, choices: _changed(
        case, choices, lambda op: op[USES], lambda op: (*op[:USES], False, op[DEPS]),
    )),
    "a lane is started twice": Mutation(lambda case, _: Case(case.program, (True,) * len(case.ahead))),
    "a lane does not run ahead": Mutation(lambda case, _: Case(case.program, (False,) * len(case.ahead))),
}  # fmt: skip
