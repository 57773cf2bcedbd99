"""Claim: the time of an update under other knobs can be predicted from one calibration of the machine, before the
change.

The bench calibrates as `tidegate calibrate` does, and runs configurations that are drawn with a seed, in interleaved
rounds. It compares the typical update time of each with the model's prediction. The model gets sizes, knobs, the length
of the backward, the order in which gradients arrive, and the path speeds with which the engine makes its plans, but
never the rates of the emulated device, and no time of an update. Rounds of the calibration and of the configurations
take turns, because the speed of a virtual machine's memory changes by tens of percent within minutes: both meet the
same speeds.

CPU updates, norms, memory, and reads and writes of storage (past the page cache) are real; copies to the device and
updates on it are emulated. If the busiest resource of a configuration is emulated, its row shows that the model follows
any speed, but not that it is right for a GPU. The figures of these rows are separate (`emulated_lanes`); the figures
outside of `emulated_lanes` are of the other rows.

`pick_regret`: how much longer the update takes in the configuration with the best prediction than in the fastest one.
Among many noisy measurements the shortest is partly luck. So the picked row and the fastest rows are measured again,
and the second measurement counts (`pick_regret_at_first`: by the first one).

`mean_…`: errors of a simple predictor, the mean of all rows. `equation_…`: errors of the papers' equations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from predicting.choices import Choice, Kind, by_kind, draw
from predicting.emulation import affordable
from predicting.errors import Row, picked, regret, summary
from predicting.scatter import svg
from predicting.training import STATE_BYTES, TENSOR_NUMEL, Measured, Training, mean, typical_seconds
from storage.figures import cpu_name

from tidegate.agent.calibration import calibrate
from tidegate.agent.devices.emulated import EmulatedDevice
from tidegate.agent.ranks import cpu_lane_threads
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.simulator.paper_equations import interleaved_seconds, stored_seconds
from tidegate.simulator.steady_state import Rank, speeds_of, steady_steps
from tidegate.simulator.what_if import what_if
from tidegate.speeds.rate_card import RateCard

SETTINGS: dict[str, dict[str, int]] = {"fast": {}, "slow": {"threads": 1, "block_bytes": 256 << 10}}
"""Settings of the two paths, both directories of the same disk: `fast` uses its full queue, `slow` has one small block
in flight at a time."""
EMULATED = frozenset({"h2d", "d2h", "device"})
SETTLING = 2
"""Steps after each change of knobs that are not counted: state moves in the first, and in alternating order also in the
second."""
COUNTED = 2
"""Counted steps after each change of knobs. In alternating order there are two kinds of steps, which are counted
separately and then averaged."""
RIVALS, RIVAL_ROUNDS, RIVAL_COUNTED = 6, 30, 4
"""Sizes of the second measurement: number of the fastest rows to measure again, number of rounds, and counted steps of
a row in each round. There are many rounds, because these rows differ by less than the noise of one measurement."""
CALIBRATION_ROUNDS = 12
"""Rounds of the calibration. So many rounds take some minutes; this averages the other load on the machine, which
varies from minute to minute."""


class Rounds:
    """Measures all configurations (`choices`), round by round. Every round runs all of them, so that other load on the
    machine affects all alike.

    counted: measured updates of each configuration in a round.
    """

    def __init__(
        self, kinds: dict[Kind, Training], choices: list[Choice], counted: int, options: argparse.Namespace
    ) -> None:
        self._kinds, self._choices, self._counted, self._options = kinds, choices, counted, options
        self._seconds = 0.0
        self.found: list[list[list[Measured]]] = [[] for _ in choices]
        """For each configuration and each round, the list of its measured updates."""

    @property
    def done(self) -> int:
        """Number of rounds so far."""
        return len(self.found[0])

    def measure(self) -> None:
        """Measures one round. Does nothing after two rounds or more that took the time given."""
        if self.done >= 2 and self._seconds > self._options.seconds:
            return
        began = time.monotonic()
        for place, choice in enumerate(self._choices):
            training = self._kinds[choice.kind]
            training.turn(choice.knobs)
            for _ in range(SETTLING):
                training.step(self._options.backward)
            self.found[place].append([training.step(self._options.backward) for _ in range(self._counted)])
        self._seconds += time.monotonic() - began
        _say(self._options, f"round {self.done}")


def calibrated(
    paths: dict[str, PathSettings], device: EmulatedDevice, rounds: Rounds, options: argparse.Namespace
) -> RateCard:
    """Calibrates, and measures the configurations meanwhile: `options.rounds` rounds, evenly spread over the rounds of
    the calibration."""
    calibrations = count(1)

    def after_round() -> None:
        due = next(calibrations) * options.rounds // CALIBRATION_ROUNDS
        for _ in range(due - rounds.done):
            rounds.measure()

    return calibrate.calibrate(
        paths, device=device, cpu_threads=options.threads, rounds=CALIBRATION_ROUNDS, after_round=after_round
    ).card


def measured_again(kinds: dict[Kind, Training], rows: list[Row], options: argparse.Namespace) -> tuple[list[Row], int]:
    """Measures again the row with the shortest predicted update, and the rows with the shortest measured updates.
    Returns these rows with new times, and the number of counted updates of each."""
    few = list({id(row): row for row in [picked(rows), *sorted(rows, key=lambda row: row.measured)[:RIVALS]]}.values())
    rounds = Rounds(kinds, [row.choice for row in few], RIVAL_COUNTED, options)
    for _ in range(RIVAL_ROUNDS):
        rounds.measure()
    again = [replace(row, measured=typical_seconds(found)) for row, found in zip(few, rounds.found, strict=True)]
    return again, RIVAL_COUNTED * rounds.done


def row_of(choice: Choice, training: Training, turns: list[list[Measured]], card: RateCard) -> Row:
    measured = [mean(turn) for turn in turns]
    low, _, high = statistics.quantiles([one.update_seconds for one in measured], n=4)
    backward = statistics.median(one.backward_seconds for one in measured)
    effective = training.turn(choice.knobs)
    bottleneck = Counter(one.bottleneck for one in measured).most_common(1)[0][0]
    return Row(
        choice=choice,
        measured=typical_seconds(turns),
        low=low,
        high=high,
        predicted=predicted(training, effective, card, backward),
        equation=by_equations(training.rank, effective, card),
        bottleneck=bottleneck,
        emulated=bottleneck in EMULATED,
        spills=steady_steps(training.rank, effective, card)[0].spills,
    )


def predicted(training: Training, effective: EffectiveKnobs, card: RateCard, backward_seconds: float) -> float:
    return what_if(training.rank, effective, card, backward_seconds=backward_seconds).update_seconds


def by_equations(rank: Rank, effective: EffectiveKnobs, card: RateCard) -> float:
    """Update time in seconds by the papers' equations: the maximum of DOS Eq. 1 (CPU, link and device) and MLP Eq. 1
    (paths).

    DOS Eq. 1 assumes state of three fp32 words per parameter, and gives the speed B of the link in words. Tidegate's
    state is smaller; here a word is a third of it.
    """
    seconds = []
    for step in steady_steps(rank, effective, card):
        both = list(zip(rank.subgroups, step.placements, strict=True))
        on_cpu = sum(s.numel for s, p in both if p.processor == "cpu")
        staged = sum(s.numel for s, p in both if p.is_staged)
        bytes_per_second = min(card.h2d_bytes_per_second or math.inf, card.d2h_bytes_per_second or math.inf)
        interleaved = interleaved_seconds(
            on_cpu,
            staged,
            B=bytes_per_second / (STATE_BYTES / 3),
            U_c=card.cpu_params_per_second or math.inf,
            U_g=card.device_params_per_second or math.inf,
        )
        moved = step.lane_bytes()
        stored = {path: (moved[f"{path}:read"] + moved[f"{path}:write"]) / 2 for path in rank.host_slots}
        seconds.append(max(interleaved, stored_seconds(stored, speeds_of(card, rank.host_slots))))
    return statistics.fmean(seconds)


def result(rows: list[Row], rivals: list[Row], updates: int) -> dict[str, Any]:
    real, emulated = [row for row in rows if not row.emulated], [row for row in rows if row.emulated]
    kinds = {kind: [row for row in real if row.choice.kind == kind] for kind in {row.choice.kind for row in real}}
    regrets = [regret(group) for group in kinds.values() if len(group) > 1]
    at_first = summary(real)
    return {
        **at_first,
        "pick_regret": round(regret(rivals), 4) if rivals else None,
        "pick_regret_at_first": at_first["pick_regret"],
        "rivals": {"rows": len(rivals), "updates_of_each": updates},
        "pick_regret_within_trainings": {"median": round(statistics.median(regrets), 4), "most": round(max(regrets), 4)}
        if regrets else None,
        "slowest_by_fastest": round(max(r.measured for r in real) / min(r.measured for r in real), 1) if real else None,
        "emulated_lanes": summary(emulated),
        "table": [
            {
                **row.choice.to_dict(),
                "measured_ms": [round(1e3 * value, 2) for value in (row.low, row.measured, row.high)],
                "predicted_ms": round(1e3 * row.predicted, 2),
                "equation_ms": round(1e3 * row.equation, 2),
                "error": round(row.error, 3),
                "bottleneck": row.bottleneck,
                "emulated": row.emulated,
                "spills": row.spills,
            }
            for row in sorted(rows, key=lambda row: row.measured)
        ],
    }  # fmt: skip


def bench(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    numel = options.tensors * TENSOR_NUMEL
    paths = {name: PathSettings(directory=folder / name, **SETTINGS[name]) for name in SETTINGS}
    for name in paths:
        (folder / name).mkdir()
    sets = ((), ("fast",), ("slow",), ("fast", "slow"))
    kinds = [
        Kind(paths=paths, subgroup_numel=numel // count, gradients=mode)
        for mode in options.gradients for paths in sets for count in options.subgroups
    ]  # fmt: skip
    choices = draw(kinds, numel * STATE_BYTES, options.configurations, options.seed)
    began = time.monotonic()
    paced = affordable()
    with ExitStack() as stack:
        trainings = {
            kind: stack.enter_context(
                closing(
                    Training(
                        numel=numel,
                        subgroup_numel=kind.subgroup_numel,
                        paths={name: paths[name] for name in kind.paths},
                        device=paced,
                        cpu_threads=options.threads,
                        gradients=kind.gradients,
                        gradient_memory_bytes=int(2 * numel * options.gradient_memory),
                    )
                )
            )
            for kind in by_kind(choices)
        }
        _say(options, "calibrating")
        rounds = Rounds(trainings, choices, COUNTED, options)
        with closing(EmulatedDevice(1 << 30, paced)) as device:
            card = calibrated(paths, device, rounds, options)
        rows = [
            row_of(choice, trainings[choice.kind], times, card)
            for choice, times in zip(choices, rounds.found, strict=True)
        ]
        real = [row for row in rows if not row.emulated]
        rivals, updates = measured_again(trainings, real, options) if len(real) > 1 else ([], 0)
    return {
        **result(rows, rivals, updates),
        "updates_of_each": COUNTED * rounds.done,
        "bench_seconds": round(time.monotonic() - began, 1),
        "parameters": numel,
        "backward_seconds": options.backward,
        "seed": options.seed,
        "rates": card.to_dict(),
        "paths": SETTINGS,
        "device": "emulated",
        "emulated_rates": asdict(paced),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_threads": options.threads,
        "kernel": platform.release(),
        "torch": torch.__version__,
    }, rows


def _say(options: argparse.Namespace, what: str) -> None:
    if not options.json:
        print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure; a folder in it is used")
    parser.add_argument("--tensors", type=int, default=8, help=f"of {TENSOR_NUMEL:,} parameters each")
    parser.add_argument("--subgroups", type=int, nargs="+", default=[8, 16, 32], help="how many there are, by training")
    parser.add_argument(
        "--gradients", choices=["keep", "release"], nargs="+", default=["keep"], help="modes of gradients, by training"
    )
    parser.add_argument(
        "--gradient-memory",
        type=float,
        default=0.25,
        help="with release, device memory for gradients as a share of all gradients; the others are spilled",
    )
    parser.add_argument("--configurations", type=int, default=54)
    parser.add_argument("--backward", type=float, default=0.12, help="seconds")
    parser.add_argument("--threads", type=int, default=cpu_lane_threads(), help="of the update on the CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no round after this long, but do two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write the scatter plot to this file (SVG)")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="prediction-", dir=options.directory) as folder:
        found, rows = bench(Path(folder).resolve(), options)
    if options.plot:
        options.plot.write_text(svg(rows))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
