"""The tables that the command line prints."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from tidegate import units
from tidegate.client.step_stats import last_figures, verdict
from tidegate.knobs.kinds import larger_than_state, show_size
from tidegate.knobs.knobs import KnobKind, KnobValue, show
from tidegate.terminal import say, visible
from tidegate.wire.knobs import GenerationView, KnobBound, KnobsView, MeasuredEffect, RankKnobs
from tidegate.wire.prediction import KnobPreview, PredictedUpdate
from tidegate.wire.run import BROKEN_SECONDS, RankView, RunView

ENDED_SHOWN: Final = 3
# If the output is not a terminal, columns are not narrowed to a terminal's width.
console: Final = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)


def print_runs(runs: Sequence[RunView], refused: Sequence[str] = (), everything: bool = False) -> None:
    """Prints the runs. refused: sentences on agents that the daemon refuses."""
    for sentence in refused:
        say(sentence)
    if not runs:
        say("No runs yet: train with tidegate.attach(optimizer, model, run=…), or try `tidegate demo`.")
        return
    shown = list(runs) if everything else default_runs(runs)
    console.print(runs_table(shown))
    for run in shown:
        say(f"{run.run}: {verdict_now(run)}")
        for sentence in retired_paths(run):
            say(f"{run.run}: {sentence}")
    if any(run.device_kind == "emulated" and run.is_running for run in shown):
        say("Emulated devices copy and compute at stated rates: their speeds are no measurement.")
    if len(shown) < len(runs):
        kinds = Counter(run.liveness for run in runs if run not in shown)
        counts = " and ".join(f"{count} {liveness}" for liveness, count in kinds.most_common())
        say(f"Not shown: {counts}. See them with `tidegate status --all`.")


def default_runs(runs: Sequence[RunView]) -> list[RunView]:
    """The runs that are shown by default: all running ones, also those that have lost some ranks, and those that have
    failed in the last day; if there is none, the newest ended ones (at most ENDED_SHOWN). runs: all runs, newest first.
    """
    failed_since = time.time() - BROKEN_SECONDS
    shown = [run for run in runs if run.is_running or (run.liveness == "failed" and run.last_seen > failed_since)]
    return shown or list(runs[:ENDED_SHOWN])


def verdict_now(run: RunView) -> str:
    """What the last update of the run waited for, or which ranks are silent: the sentence of the page Now."""
    return verdict(run, last_figures(run), time.time())


def retired_paths(run: RunView) -> list[str]:
    """A sentence for each storage path that has failed on a present rank."""
    found: dict[str, list[str]] = {}
    for rank in run.ranks:
        for state in rank.last_step.path_states if rank.last_step and rank.liveness in ("live", "stale") else ():
            if state.retired:
                found.setdefault(state.path, []).append(str(rank.rank))
    return [
        f"Path {path} is retired on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:4])}"
        f"{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}: `tidegate knobs get {run.run}` says why."
        for path, ranks in found.items()
    ]


def runs_table(runs: Sequence[RunView]) -> Table:
    columns = ("run", "rank", "state", "step", "phase", "update", "exposed", "loss", "device", "host", "knobs")
    return _build_table(columns, [row for run in runs for row in _run_rows(run)])


def _run_rows(run: RunView) -> list[tuple[str, ...]]:
    """One row for each rank; with several ranks also one row for all of them, with the times of the slowest rank."""
    rows = [_rank_row(run, rank) for rank in run.ranks]
    if (sums := run.totals) is not None and sums.ranks > 1:
        slowest = f"rank {sums.slowest_rank} slowest"
        times = (_seconds(sums.update_seconds), _seconds(sums.exposed_seconds))
        rows.append((run.run, f"all {sums.ranks}", run.liveness, str(sums.step), slowest, *times, *[""] * 4))
    return rows


def _rank_row(run: RunView, rank: RankView) -> tuple[str, ...]:
    last = rank.last_step
    silent = f" {units.duration(max(0.0, time.time() - rank.last_seen))}" if rank.liveness in ("stale", "lost") else ""
    return (
        run.run,
        f"{rank.rank}/{run.world_size}",
        rank.liveness + silent,
        str(rank.step),
        rank.phase if rank.liveness == "live" else "",
        _seconds(last.phase_seconds.get("update")) if last else "",
        _seconds(sum(last.exposed_seconds.values())) if last else "",
        f"{last.loss:.4f}" if last and last.loss is not None else "",
        rank.device_kind,
        rank.host,
        f"#{rank.applied_generation} " + shown(rank.effective),
    )


def print_knobs(view: KnobsView) -> None:
    rows = [
        (
            name,
            show(name, value),
            _bounds_text(bound, view.retired),
            bound.help,
        )
        for name, value in view.desired.items()
        if (bound := view.bounds.get(name))
    ]
    say(f"Run {view.run}, newest generation {view.generation}")
    table(("knob", "desired", "bounds", "what it does"), rows)
    for path, why in view.retired.items():
        say(f"{path}: retired {why}")
    if view.pending:
        say(f"Generation {view.pending.generation} waits for the ranks: {shown(view.pending.changes)}")
    print_ranks(view.ranks)


def print_ranks(ranks: Iterable[RankKnobs]) -> None:
    rows = [(str(r.rank), r.liveness, str(r.applied_generation), shown(r.effective), r.refused or "") for r in ranks]
    if rows:
        table(("rank", "state", "applied", "effective", "refused because"), rows)


def print_generation(made: GenerationView, ranks: Sequence[RankKnobs]) -> None:
    if made.state == "proposed":
        say(f"Generation {made.generation} is still being voted on: see `tidegate history`.")
    else:
        say(f"Generation {made.generation} {made.state}: {shown(made.knobs)}. {made.outcome}")
    if note := _unused_cache(made, ranks):
        say(note)
    if made.canary is not None and made.canary.state == "waiting":
        say(f"Canary: {made.canary.steps} steps decide; watch it with `tidegate history` or `tidegate events -f`.")
    print_ranks(ranks)


def _unused_cache(made: GenerationView, ranks: Sequence[RankKnobs]) -> str:
    """The sentence that says that a new `host_cache` is larger than the state of each rank; empty if it is not."""
    cache, largest = made.changes.get("host_cache"), max(ranks, key=lambda rank: rank.state_bytes, default=None)
    if largest is None or isinstance(cache, str | None) or not 0 < largest.state_bytes < cache:
        return ""
    return larger_than_state(int(cache), largest.state_bytes, largest.rank)


def print_preview(preview: KnobPreview) -> None:
    if not preview.changed:
        say("Nothing would change.")
    rows: list[tuple[str, ...]] = [
        (name, show(name, preview.before[name]), show(name, value)) for name, value in preview.changed.items()
    ]
    before, after = preview.predicted_update_seconds_before, preview.predicted_update_seconds_after
    if before is not None and after is not None:
        rows.append(("update, predicted", _seconds(before), _seconds(after)))
    rows += _predicted_rows(preview.predicted_before, preview.predicted_after)
    table(("", "now", "then"), rows)
    if preview.error_ratio is not None:
        say(f"The prediction of the present knobs is off by {preview.error_ratio:.0%} of what was measured.")
    if preview.no_prediction:
        say(preview.no_prediction)
    if preview.no_room:
        say(preview.no_room)
    for note in preview.notes:
        say(note)


def _predicted_rows(before: PredictedUpdate | None, after: PredictedUpdate | None) -> Iterator[tuple[str, ...]]:
    """Table rows that compare the predictions before and after a change of knobs: the range of update times that
    contains 9 of 10 updates, stalls by cause, the lower bound of the update with its reason, and memory. No rows if a
    prediction is None."""
    if before is None or after is None:
        return
    if after.low_seconds is not None and after.high_seconds is not None:
        yield "9 of 10 updates", *(_range(p.low_seconds, p.high_seconds) for p in (before, after))
    for cause in dict.fromkeys([*before.stalls, *after.stalls]):
        yield (
            f"stalled by {cause}",
            _seconds(before.stalls.get(cause, 0.0)),
            _seconds(after.stalls.get(cause, 0.0)),
        )
    yield "at least, and why", *(f"{_seconds(p.bound_seconds)} {p.bound_by}" for p in (before, after))
    yield "host memory", *(units.nbytes(sum(p.host_memory_bytes.values())) for p in (before, after))
    yield "device memory for state", *(units.nbytes(p.device_memory_bytes) for p in (before, after))


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{_seconds(low)} to {_seconds(high)}"


def print_generations(found: Iterable[GenerationView]) -> None:
    rows = []
    for made in found:
        what = shown(made.changes) or shown(made.knobs)
        outcome = " ".join(part for part in (made.outcome, made.reason and f"({made.reason})", _trial(made)) if part)
        when, effect = units.moment(made.created_at), _measured(made.measured_effect)
        rows.append((str(made.generation), made.state, what, made.author, when, effect, outcome))
    table(("#", "state", "change", "who", "when", "update", "outcome"), rows)


def _measured(effect: MeasuredEffect | None) -> str:
    if effect is None:
        return ""
    seconds = f"{_seconds(effect.update_seconds_before)} → {_seconds(effect.update_seconds_after)}"
    return f"{seconds} ({effect.difference})" if effect.difference else seconds


def _trial(made: GenerationView) -> str:
    if made.canary is None:
        return ""
    return f"[canary {made.canary.state.replace('_', ' ')}: {made.canary.verdict or 'too few steps yet'}]"


def shown(knobs: dict[str, KnobValue]) -> str:
    """The knobs as text, such as `stride=3 static_ratio=0.25`."""
    return " ".join(f"{name}={show(name, value)}" for name, value in knobs.items())


def _bounds_text(bound: KnobBound, retired: Collection[str]) -> str:
    """The accepted values of a knob as text, without the paths that are retired."""
    of_kind: dict[KnobKind, str] = {
        "number": f"{bound.minimum:g} to {bound.maximum:g}",
        "size": f"{show_size(bound.minimum)} to {show_size(bound.maximum)}",
        "weights": ",".join(f"{path}:WEIGHT" for path in bound.paths if path not in retired),
        "choice": "",
    }
    return ", ".join(part for part in (of_kind[bound.kind], *bound.words) if part)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints the rows as a table; nothing if there are no rows."""
    built = _build_table(columns, rows)
    if built.row_count:
        console.print(built)


def _build_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with control characters in its cells escaped."""
    built = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        built.add_row(*map(visible, row))
    return built
