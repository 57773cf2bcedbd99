"""What counts as ordered, and what becomes of copies that race."""

from __future__ import annotations

import pytest

from tests.agent.devices.vector_clocks import Order, RaceError


def ordered(order: Order, first: str, then: str) -> None:
    """`then` waits for what `first` has done."""
    order.learn(then, order.clocks[first])


def test_accesses_that_nothing_orders() -> None:
    order = Order()
    order.write("a", 100, 50, "first")
    with pytest.raises(RaceError, match=r"Nothing orders second \(b, reading 10 bytes .*first \(a, writing 50"):
        order.read("b", 140, 10, "second")


def test_readers_and_neighbours_do_not_meet() -> None:
    order = Order()
    order.write("a", 100, 50, "")
    order.write("b", 150, 50, "")
    order.write("c", 50, 50, "")
    ordered(order, "a", "b")
    ordered(order, "a", "c")
    order.read("b", 100, 50, "")
    order.read("c", 100, 50, "")


def test_order_goes_through_third_parties() -> None:
    order = Order()
    order.write("a", 0, 8, "")
    ordered(order, "a", "b")
    ordered(order, "b", "c")
    order.write("c", 0, 8, "")


def test_what_was_done_after_the_wait_is_not_covered_by_it() -> None:
    order = Order()
    ordered(order, "a", "b")
    order.write("a", 0, 8, "")
    with pytest.raises(RaceError):
        order.write("b", 0, 8, "")


def test_a_writer_must_wait_for_every_reader() -> None:
    order = Order()
    order.write("a", 0, 8, "")
    for reader in ("b", "c"):
        ordered(order, "a", reader)
        order.read(reader, 0, 8, "")
    ordered(order, "b", "a")
    with pytest.raises(RaceError, match=r"reading .* bytes"):
        order.write("a", 4, 8, "")


def test_a_write_into_the_middle_leaves_the_ends_as_they_were() -> None:
    order = Order()
    order.write("a", 0, 100, "")
    ordered(order, "a", "b")
    order.write("b", 40, 20, "")
    ordered(order, "b", "c")
    order.read("c", 0, 100, "")
    with pytest.raises(RaceError, match="a, writing 40 bytes"):
        order.read("d", 60, 40, "")


def test_a_torn_copy_may_be_thrown_away() -> None:
    order = Order()
    order.copy("a", dst=1000, src=0, nbytes=8, what="copy")
    order.write("b", 0, 8, "change")
    order.copy("a", dst=1000, src=500, nbytes=8, what="copy again")
    order.read("a", 1000, 8, "use")


def test_a_torn_copy_may_not_be_used() -> None:
    order = Order()
    order.write("b", 0, 8, "change")
    order.copy("a", dst=1000, src=0, nbytes=8, what="copy")
    with pytest.raises(RaceError, match=r"use .* reads what is torn: Nothing orders copy"):
        order.read("a", 1000, 8, "use")


def test_a_copy_that_was_used_may_not_turn_out_to_be_torn() -> None:
    order = Order()
    order.copy("a", dst=1000, src=0, nbytes=8, what="copy")
    order.read("a", 1000, 8, "use")
    with pytest.raises(RaceError, match="has been used already"):
        order.write("b", 0, 8, "change")


def test_memory_is_not_given_up_under_a_copy() -> None:
    order = Order()
    order.copy("a", dst=1000, src=0, nbytes=8, what="copy")
    with pytest.raises(RaceError, match="while it is in use"):
        order.give_up("b", 0, 8, "freeing")
    ordered(order, "a", "b")
    order.give_up("b", 0, 8, "freeing")
