"""The tuner in a real training with storage paths: what it asks and may move; and Eq. 1 as a split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import tidegate
from tests.agent.training import Training
from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.control import tuning as tuning_module
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.engine import memory_budget as memory_module
from tidegate.agent.optimizer import host_cache as cache_module
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.knobs.knobs import Knobs
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.residency import _is_close
from tidegate.simulator.predictor import Predictor
from tidegate.speeds.live_rates import PERSISTENT_STEPS, WINDOW_STEPS
from tidegate.speeds.rate_card import PathRates
from tidegate.tuner.tuner import FIRST_SEARCH_STEPS, LONGEST_WAIT_STEPS, Move


def two(folder: Path) -> dict[str, str]:
    for name in ("nvme", "pfs"):
        (folder / name).mkdir()
    return {name: str(folder / name) for name in ("nvme", "pfs")}


def test_it_asks_the_model_of_the_run_and_moves_to_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(stride="auto", paths=two(tmp_path), host_cache=0)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="tuning") as attachment:
        moves: list[Move | None] = []
        seen: list[EffectiveKnobs] = []
        optimizer.observers.append(lambda result, _: seen.append(result.effective))
        tuning = attachment.tuning
        look = tuning._search

        def watched() -> Move | None:
            """The real look, on the real rates; then a move that does not depend on how fast this machine is now."""
            moves.append(look())
            now = optimizer.engine.effective
            return Move(EffectiveKnobs(4.0, now.static_ratio, now.tier_split, now.host_cache_bytes, True), 0.5)

        monkeypatch.setattr(tuning, "_search", watched)
        for _ in range(FIRST_SEARCH_STEPS + 2):
            training.step()
        assert len(moves) == 1
        assert moves[0] is None or moves[0].to.static_ratio == 0.0
        assert (seen[-1].stride, seen[-1].alternate) == (4.0, True)
        assert tuning.tunable == {"stride", "order"}
        rates = attachment.recorder.rates
        assert rates is not None
        assert set(rates.paths) == {"nvme", "pfs"}
        assert rates.missing == ()


@pytest.mark.parametrize(
    ("knobs", "free"),
    [
        (Knobs(stride="auto", order="pinned", host_cache=0), {"stride"}),
        (Knobs(stride=2.0, host_cache=0), {"order"}),
        (Knobs(stride="off", order="alternate", host_cache=0), set()),
    ],
)
def test_what_is_pinned_is_not_moved(tmp_path: Path, knobs: Knobs, free: set[str]) -> None:
    training = Training(paths=two(tmp_path), host_cache=0)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="pinned") as attachment:
        optimizer.apply_knobs(knobs)
        assert attachment.tuning.tunable == free


def test_it_asks_of_the_paths_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(stride="auto", paths=two(tmp_path), host_cache=0)
    asked: list[Mapping[str, int]] = []

    def watched(predictor: Predictor, *_: object, **__: object) -> None:
        asked.append(predictor.rank.capacity)

    monkeypatch.setattr(tuning_module, "find_move", watched)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="retired") as attachment:
        training.step()
        assert attachment.tuning._search() is None
        assert optimizer.engine.store is not None
        optimizer.engine.store.retire("pfs", "gone")
        training.step()
        assert attachment.tuning._search() is None
        last = attachment.recorder.totals.last
        assert last is not None
        assert [(state.path, state.retired) for state in last.path_states] == [("nvme", False), ("pfs", True)]
    assert min(asked[0].values()) >= len(optimizer.engine.layouts) // 2
    assert (asked[1]["pfs"], asked[1]["nvme"] > 0) == (0, True)


def test_without_paths_there_is_no_order_to_choose() -> None:
    training = Training(stride="auto")
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="none") as attachment:
        assert attachment.tuning.tunable == {"stride"}


@pytest.mark.slow
def test_a_link_that_slows_down_for_good_gets_new_rates_and_keeps_its_ceiling() -> None:
    """To a twentieth: no busy machine looks like that. The next look comes at once."""
    training = Training(stride="auto")
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="drift") as attachment:
        recorder, tuner = attachment.recorder, attachment.tuning.tuner
        for _ in range(WINDOW_STEPS):
            training.step()
        before, ceilings = recorder.rates, recorder.rows("tidegate_link_ceiling_bytes_per_second")
        assert before is not None
        assert before.h2d_bytes_per_second is not None
        tuner._wait(LONGEST_WAIT_STEPS)
        device = optimizer.device
        assert isinstance(device, EmulatedDevice)
        device.rates.h2d_bytes_per_second /= 20
        device.rates.d2h_bytes_per_second /= 20
        for _ in range(PERSISTENT_STEPS + 1):
            training.step()
        after = recorder.rates
        assert after is not None
        assert after.h2d_bytes_per_second is not None
        assert after.h2d_bytes_per_second < before.h2d_bytes_per_second / 4
        assert recorder.recalibrations > 0
        assert recorder.rows("tidegate_link_ceiling_bytes_per_second") == ceilings
        assert tuner._trial is not None or tuner._steps_left < LONGEST_WAIT_STEPS - PERSISTENT_STEPS - 1


def test_a_host_cache_that_is_auto_may_grow_where_memory_came_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began when memory was short: once there is more, the model is asked about more cache, and it is applied."""
    monkeypatch.setattr(cache_module, "host_available_bytes", lambda: 0)
    training = Training(stride="off", order="pinned", paths=two(tmp_path))
    monkeypatch.setattr(cache_module, "host_available_bytes", host_available_bytes)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="cache") as attachment:
        tuning = attachment.tuning
        assert tuning.tunable == {"host_cache"}
        assert optimizer.engine.effective.host_cache_bytes == 0
        training.step()
        # However fast this machine's disk is: state on it is what the update waits for.
        speeds = PathRates(read_bytes_per_second=1e7, write_bytes_per_second=1e7)
        slow = replace(attachment.recorder.rates, paths=dict.fromkeys(("nvme", "pfs"), speeds))
        monkeypatch.setattr(Recorder, "rates", property(lambda _: slow))
        state = sum(s.nbytes("state") for s in optimizer.engine.subgroups)
        with monkeypatch.context() as short:
            short.setattr(memory_module, "host_available_bytes", lambda: -state)
            assert tuning._best_candidate() is None, "budgets of memory hold for the tuner, too"
        wanted = tuning._best_candidate()
        assert wanted is not None, "what is cached is neither fetched nor flushed"
        assert wanted.to.host_cache_bytes >= state
        assert tuning._apply(wanted.to) is None
        training.step()
        training.step()
        residences = optimizer.engine.residences
        assert residences is not None
        assert sum(residences.counts.values()) == 0


def test_what_is_pinned_is_not_what_auto_means_later(tmp_path: Path) -> None:
    training = Training(paths=two(tmp_path), host_cache=0)
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="pinned") as attachment:
        optimizer._set_auto(stride=2.0, alternate=False)
        optimizer.apply_knobs(Knobs(stride=7.0, host_cache=0))
        now = optimizer.engine.effective
        assert attachment.tuning._apply(replace(now, alternate=True)) is None
        assert (optimizer.engine.effective.stride, optimizer.engine.effective.alternate) == (7.0, True)
        optimizer.apply_knobs(Knobs(stride="auto", host_cache=0))
        assert optimizer.engine.effective.stride == 2.0


def test_a_recalibration_while_ranks_tell_each_other_is_told_the_next_time() -> None:
    training = Training(stride="auto")
    with training.optimizer as optimizer, tidegate.attach(optimizer, training.model, run="late") as attachment:
        tuning, recorder = attachment.tuning, attachment.recorder
        said = tuning.boundary_message(0)
        recorder._live.recalibrations = 1
        tuning.between_steps(said)
        assert tuning.boundary_message(0).rates_changed
        tuning.between_steps(said)
        assert not tuning.boundary_message(0).rates_changed


def test_eq1_divides_by_the_slower_direction(tmp_path: Path) -> None:
    training = Training(paths=two(tmp_path), host_cache=0, tier_split="eq1")
    with training.optimizer as optimizer:
        residences = optimizer.engine.residences
        assert residences is not None
        speeds = {name: min(s.read_bytes_per_second, s.write_bytes_per_second)
                  for name, s in optimizer.engine.store.ceilings.items()}  # type: ignore[union-attr]  # fmt: skip
        counts = residences.counts
        total = sum(counts.values())
        assert total == len(optimizer.engine.layouts)
        for name, count in counts.items():
            assert abs(count - total * speeds[name] / sum(speeds.values())) <= 1
        training.step()
        optimizer.apply_knobs(Knobs(tier_split="nvme:1", host_cache=0))
        training.step()
        assert residences.counts == {"nvme": total, "pfs": 0}
        optimizer.apply_knobs(Knobs(tier_split="eq1", host_cache=0))
        training.step()
        assert residences.counts["pfs"] > 0


@pytest.mark.parametrize(
    ("counts", "wanted", "capacity", "near"),
    [
        ({"a": 8, "b": 8}, {"a": 9, "b": 7}, {}, True),
        ({"a": 8, "b": 8}, {"a": 10, "b": 6}, {}, False),
        ({"a": 50, "b": 50}, {"a": 55, "b": 45}, {}, True),
        ({"a": 50, "b": 50}, {"a": 56, "b": 44}, {}, False),
        ({"a": 8, "b": 8}, {"a": 7, "b": 9}, {"a": 7}, False),
    ],
)
def test_eq1_stays_while_speeds_wobble(
    counts: dict[str, int], wanted: dict[str, int], capacity: dict[str, int], near: bool
) -> None:
    """One subgroup or 5 % more or less is not worth moving state, unless a path cannot hold what it has."""
    assert _is_close(counts, wanted, capacity) is near
