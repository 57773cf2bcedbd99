"""`tidegate status` and `tidegate events`: show the state and the events of runs, once or continuously."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer
from rich.console import Group
from rich.live import Live

from tidegate import units
from tidegate.cli.options import Daemon, Json, RunOption, choose_run, client_for, newest_first
from tidegate.cli.tables import console, default_runs, print_runs, runs_table, shown, verdict_now
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError, DaemonError, DaemonUnreachable, NotAuthorized
from tidegate.terminal import say, visible
from tidegate.wire.event import Event
from tidegate.wire.run import RunView

PAUSE_SECONDS: Final = 2.0
PATIENCE_SECONDS: Final = 60.0
"""Longest time for which a daemon may be unreachable before `events --follow` ends."""
CONTINUED: Final = "\n" + " " * 22
"""Replaces line breaks in an event's text by indented ones, so that no further line of a reason looks like another
event."""


def status(
    run: RunOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 s, until Ctrl-C.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show runs that ended, too.")] = False,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Show the runs, newest first: their ranks with the last step of each, what the update waits for, and agents that
    are refused."""
    if watch and as_json:
        raise ConfigError(
            "--watch cannot be combined with --json: for a stream of JSON use `tidegate events --follow --json`."
        )
    with client_for("read", url) as client:

        def fetch() -> list[RunView]:
            return [client.run(run)] if run else newest_first(client.runs())

        def refused() -> list[str]:
            return [agents.sentence for agents in client.refused_agents()]

        if watch:
            _watch(fetch, refused, everything)
        elif as_json:
            say(json.dumps([{**run.model_dump(mode="json"), "verdict": verdict_now(run)} for run in fetch()]))
        else:
            print_runs(fetch(), refused(), everything)


def events(
    run: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events, too, until Ctrl-C.")] = False,
    after: Annotated[int, typer.Option(help="Only events after this id.", min=0)] = 0,
    url: Daemon = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each event.")] = False,
) -> None:
    """Print the events of a run: generations, canaries, ranks that joined or left. With --json, also the reports of the
    ranks."""
    with client_for("read", url) as client:
        name = choose_run(client, run).run
        newest = None if follow else client.newest_event(name)
        last, printed = after, PrintedStates()
        try:
            while newest is None or last < newest:
                last = _print_events(client, name, last, newest, as_json, printed)
        except KeyboardInterrupt:
            return


def _print_events(
    client: DaemonClient, run: str, last: int, end: int | None, as_json: bool, printed: PrintedStates
) -> int:
    """Prints events after the id `last` until the stream ends, or until the id `end`. Returns the id of the last event.

    Waits for up to PATIENCE_SECONDS for a daemon that restarts. printed: states printed before, see `sentence`.
    """
    lost_at: float | None = None
    while True:
        try:
            for event in client.events(run, last_event_id=last):
                last, lost_at = event.id, None
                if text := event.model_dump_json() if as_json else _sentence_or_error(event, printed):
                    say(text.replace("\n", CONTINUED), flush=True)
                if end is not None and last >= end:
                    return last
            time.sleep(PAUSE_SECONDS)  # the daemon closed the stream, because it stops or restarts
            return last
        except NotAuthorized:
            raise
        except DaemonUnreachable:
            lost_at = lost_at or time.monotonic()
            if end is not None or time.monotonic() - lost_at > PATIENCE_SECONDS:
                raise
            time.sleep(PAUSE_SECONDS)


@dataclass
class PrintedStates:
    """The states that were printed last, so that unchanged states are not printed again."""

    generations: dict[int, tuple[str, str]] = field(default_factory=dict)
    """State of each generation and of its canary, by number of the generation; the second is "" without a canary."""
    ranks: dict[int, str] = field(default_factory=dict)
    """Liveness of each rank."""


def _sentence_or_error(event: Event, printed: PrintedStates) -> str:
    """The sentence of an event. DaemonError if the event's data have a form that this version does not know."""
    try:
        return sentence(event, printed)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise DaemonError(
            f"The data of event {event.id} have a form that this version does not know: use the daemon's version of "
            "Tidegate, or --json.", 502,
        ) from error  # fmt: skip


def sentence(event: Event, printed: PrintedStates) -> str:
    """The event as a sentence for display; empty for reports, which come every second, and for unchanged states.

    printed: states printed before; it is updated.
    """
    data, at = event.data, units.moment(event.timestamp)
    if event.kind == "agent":
        rank, liveness = int(data.get("rank", -1)), str(data.get("liveness"))
        known, printed.ranks[rank] = printed.ranks.get(rank), liveness
        return f"{at}  rank {rank} is {liveness}" if liveness != known else ""  # a rank that reconnects: no change
    if event.kind != "generation":
        return ""
    number, trial = int(data.get("generation", -1)), data.get("canary") or {}
    before, now = printed.generations.get(number, ("", "")), (str(data.get("state")), str(trial.get("state", "")))
    printed.generations[number] = now
    if before == now:  # only its measured effect has changed: see `history`
        return ""
    if before[0] == now[0]:
        return f"{at}  generation {number}, canary {now[1].replace('_', ' ')}: {trial.get('verdict', '')}".rstrip(". ")
    words = [f"{at}  generation {number} {now[0]}: {shown(data.get('knobs') or {})}"]
    words += [str(data["outcome"])] if data.get("outcome") and now[0] != "applied" else []
    return ". ".join(word.rstrip(".") for word in words)


def _watch(fetch: Callable[[], list[RunView]], refused: Callable[[], list[str]], everything: bool) -> None:
    """Shows the table of runs, their verdicts, and sentences on refused agents. Updates them every PAUSE_SECONDS until
    Ctrl-C."""

    def shown() -> Group:
        found = fetch()
        runs = found if everything else default_runs(found)
        sentences = [*(f"{run.run}: {verdict_now(run)}" for run in runs), *refused()]
        return Group(runs_table(runs), *map(visible, sentences))

    try:
        with Live(shown(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(PAUSE_SECONDS)
                try:
                    live.update(shown(), refresh=True)
                except DaemonUnreachable as error:
                    live.update(visible(f"{error} Trying again."), refresh=True)
    except KeyboardInterrupt:
        return
