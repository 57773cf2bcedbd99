"""The clock that lanes wait on: whoever has what it waits for is woken, the others sleep on."""

from __future__ import annotations

import threading

from tidegate.agent.engine.clock import MonotonicClock


class Waiter:
    """A thread that waits until it is its turn. `asked_by` are the threads that asked whether it is."""

    def __init__(self, clock: MonotonicClock) -> None:
        self.clock, self.turn, self.asked_by, self.waits = clock, False, [], threading.Event()
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()
        self.waits.wait(5)

    def _wait(self) -> None:
        with self.clock.lock:
            self.clock.wait_for(self._has_turn)

    def _has_turn(self) -> bool:
        self.asked_by.append(threading.current_thread())
        self.waits.set()
        return self.turn

    def give_turn(self) -> None:
        with self.clock.lock:
            self.turn = True
            self.clock.notify()


def test_only_who_has_what_it_waits_for_is_woken() -> None:
    clock = MonotonicClock()
    one, other = Waiter(clock), Waiter(clock)
    one.give_turn()
    one.thread.join(5)
    assert not one.thread.is_alive()
    assert other.thread.is_alive()
    assert other.asked_by.count(other.thread) == 1, "it was asked about, and not woken"
    other.give_turn()
    other.thread.join(5)
    assert not other.thread.is_alive()


def test_a_wait_ends_with_its_timeout_and_leaves_nothing_behind() -> None:
    clock = MonotonicClock()
    asked: list[threading.Thread] = []
    with clock.lock:
        assert not clock.wait_for(lambda: bool(asked.append(threading.current_thread())), timeout=0.01)
        before = len(asked)
        clock.notify()
    assert len(asked) == before
