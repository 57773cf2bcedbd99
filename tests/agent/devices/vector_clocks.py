"""Happens-before by vector clocks: which accesses to memory nothing orders.

An actor is a stream or a host thread. Its clock counts what it knows to be done, for each actor. A record of an access
is ordered before another when the other's actor had heard of it.

Copies and sums are judged by what becomes of them. The engine copies and sums gradients before it knows that they are
final, and throws the result away when they were not: a copy that read while somebody wrote leaves *torn* bytes, and
only whoever reads those makes it an error.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

Clock = dict[str, int]
Range = tuple[int, int]
"""First address, and the one behind the last."""


class RaceError(AssertionError):
    """Two accesses to the same bytes, one of them writing, that nothing orders."""


@dataclass(frozen=True)
class Access:
    """What `actor` did to a range at its time `tick`. `copy_id` is the copy that it is a part of, 0 for none."""

    start: int
    end: int
    actor: str
    tick: int
    write: bool
    what: str
    copy_id: int = 0
    torn: str = ""

    def overlaps(self, other: Access) -> bool:
        return self.start < other.end and other.start < self.end

    def without(self, other: Access) -> list[Access]:
        """The parts that `other` does not cover."""
        parts = [(self.start, min(self.end, other.start)), (max(self.start, other.end), self.end)]
        return [replace(self, start=start, end=end) for start, end in parts if start < end]


@dataclass
class Order:
    """All actors' clocks and what is known of each byte. Not thread-safe."""

    clocks: dict[str, Clock] = field(default_factory=lambda: defaultdict(dict))
    accesses: list[Access] = field(default_factory=list)
    last_copy: int = 0

    def tick(self, actor: str) -> int:
        clock = self.clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def learn(self, actor: str, known: Clock) -> None:
        """What `known` holds is done before what `actor` does from now on."""
        clock = self.clocks[actor]
        for other, tick in known.items():
            if clock.get(other, 0) < tick:
                clock[other] = tick

    def read(self, actor: str, start: int, nbytes: int, what: str) -> None:
        self._note(Access(start, start + nbytes, actor, self.tick(actor), False, what))

    def write(self, actor: str, start: int, nbytes: int, what: str) -> None:
        self._note(Access(start, start + nbytes, actor, self.tick(actor), True, what))

    def copy(self, actor: str, dst: int, src: int, nbytes: int, what: str, result_bytes: int | None = None) -> None:
        """`result_bytes`: bytes that are written, if these are not as many as are read: a sum."""
        self.last_copy += 1
        tick = self.tick(actor)
        reading = Access(src, src + nbytes, actor, tick, False, what, self.last_copy)
        # The destination first: what the copy reads may show that it is torn.
        end = dst + (nbytes if result_bytes is None else result_bytes)
        self._note(Access(dst, end, actor, tick, True, what, self.last_copy))
        self._note(reading)

    def is_torn(self, address: int) -> bool:
        """Whether the bytes there are a copy or a sum of what somebody wrote meanwhile."""
        return any(a.start <= address < a.end and a.torn for a in self.accesses)

    def give_up(self, actor: str, start: int, nbytes: int, what: str) -> None:
        """The memory may be used for something else at once: nobody may be at work on it, not even a copy."""
        mine = Access(start, start + nbytes, actor, self.tick(actor), True, what)
        for known in self.accesses:
            if known.overlaps(mine) and not self._is_before(known, mine):
                raise RaceError(f"{_say(mine)} while it is in use: nothing orders it after {_say(known)}.")
        self._note(mine)

    def _note(self, new: Access) -> None:
        for known in [a for a in self.accesses if a.overlaps(new) and (a.write or new.write)]:
            if not self._is_before(known, new):
                self._conflict(known, new)
            if not new.write and known.torn:
                raise RaceError(f"{_say(new)} reads what is torn: {known.torn}")
        kept = []
        for known in self.accesses:
            gone = known.overlaps(new) and (new.write or (known.actor == new.actor and not known.write))
            kept += known.without(new) if gone else [known]
        self.accesses = [*kept, new] if new.start < new.end else kept

    def _is_before(self, known: Access, new: Access) -> bool:
        return known.actor == new.actor or self.clocks[new.actor].get(known.actor, 0) >= known.tick

    def _conflict(self, known: Access, new: Access) -> None:
        told = f"Nothing orders {_say(new)} after {_say(known)}."
        reading = next((a for a in (known, new) if a.copy_id and not a.write), None)
        if reading is None:
            raise RaceError(told)
        for i, found in enumerate(self.accesses):
            if found.copy_id == reading.copy_id and found.write:
                if any(a.overlaps(found) and not a.write for a in self.accesses):
                    raise RaceError(f"{told} What was copied has been used already.")
                self.accesses[i] = replace(found, torn=told)


def _say(access: Access) -> str:
    verb = "writing" if access.write else "reading"
    return f"{access.what} ({access.actor}, {verb} {access.end - access.start} bytes at {access.start:#x})"
