"""`tidegate knobs get | set`, `history`, `rollback` and `advice`: commands that show, change, restore and recommend the
knobs of a run."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer

from tidegate.cli.options import Daemon, Json, Reason, RunOption, Wait, choose_run, client_for, output, utf8
from tidegate.cli.tables import print_generation, print_generations, print_knobs, print_preview, shown
from tidegate.client.daemon_client import DaemonClient
from tidegate.errors import ConfigError
from tidegate.knobs.knobs import KnobValue
from tidegate.knobs.knobs import spec as knob_spec
from tidegate.terminal import say
from tidegate.wire.canary import MAX_CANARY_STEPS, CanaryRequest
from tidegate.wire.knobs import GenerationView, RankKnobs
from tidegate.wire.prediction import Advice

APPLY_SECONDS: Final = 2.0
"""Longest time in seconds for which a command waits until all ranks have applied the agreed knobs. Ranks apply knobs
between two steps."""
app = typer.Typer(help="Show and change the knobs of a run.", no_args_is_help=True)


@app.command("get")
def get(
    run: Annotated[str | None, typer.Argument(help="Name of the run.", callback=utf8)] = None,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Show the desired knobs, and the knobs that each rank uses."""
    with client_for("read", url) as client:
        view = client.knobs(choose_run(client, run).run)
    output(view, as_json, print_knobs)


@app.command("set")
def change(
    changes: Annotated[list[str], typer.Argument(metavar="[RUN] KNOB=VALUE...", callback=utf8)],
    run: RunOption = None,
    reason: Reason = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it would do.")] = False,
    canary: Annotated[
        int | None,
        typer.Option(
            help="Compare this number of steps with those before; restore the knobs if they are slower.",
            min=5,
            max=MAX_CANARY_STEPS,
        ),
    ] = None,
    min_effect: Annotated[
        float | None,
        typer.Option(help="Smallest change that counts, as a share of a step's time; default: 0.05.", min=0.001, max=1),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(help="Change nothing unless this is still the newest generation.")
    ] = None,
    wait: Wait = 10.0,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Change knobs of a run while it trains, as in `stride=3 static_ratio=0.25`. Either all ranks apply the change, or
    none."""
    if run is None and "=" not in changes[0]:
        run, changes = changes[0], changes[1:]
    wanted, trial = _parse_changes(changes), _trial(canary, min_effect)
    with client_for("operate", url) as client:
        name = choose_run(client, run).run
        seen = client.knobs(name).generation if generation is None else generation
        if dry_run:
            output(client.preview_knobs(name, wanted, seen), as_json, print_preview)
            return
        made = client.set_knobs(name, wanted, generation=seen, reason=reason, wait=wait, canary=trial)
        ranks = _ranks_with(client, made)
    _show(made, ranks, as_json)


def rollback(
    to: Annotated[
        int | None,
        typer.Argument(help="Generation to restore; default: the newest earlier one that no canary found bad."),
    ] = None,
    run: RunOption = None,
    reason: Reason = "",
    wait: Wait = 10.0,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Restore the knobs of an earlier generation immediately. Ends a canary that is running."""
    with client_for("operate", url) as client:
        made = client.roll_back(choose_run(client, run).run, to, reason=reason, wait=wait)
        ranks = _ranks_with(client, made)
    _show(made, ranks, as_json)


def history(run: RunOption = None, url: Daemon = None, as_json: Json = False) -> None:
    """List every change of a run's knobs, and its outcome."""
    with client_for("read", url) as client:
        found = client.generations(choose_run(client, run).run)
    output(found, as_json, print_generations)


def advice(run: RunOption = None, url: Daemon = None, as_json: Json = False) -> None:
    """Show the knobs that Tidegate recommends for a run, and the gain that its simulation predicts. Changes nothing."""
    with client_for("read", url) as client:
        found = client.advice(choose_run(client, run).run)
    output(found, as_json, _print_advice)


def _print_advice(found: Advice) -> None:
    say(found.sentence)
    if found.changes:
        say(f"Try it: tidegate knobs set --run {found.run} {shown(found.changes)} --canary 20")


def _ranks_with(client: DaemonClient, made: GenerationView) -> tuple[RankKnobs, ...]:
    """Returns the knobs of all ranks. If the generation is committed, first waits until all live ranks have applied it,
    but at most APPLY_SECONDS: ranks apply it between two steps, and a step may be long."""
    latest = time.monotonic() + APPLY_SECONDS
    while True:
        ranks = client.knobs(made.run).ranks
        behind = [r for r in ranks if r.liveness == "live" and r.applied_generation < made.generation]
        if made.state != "committed" or not behind or time.monotonic() > latest:
            return ranks
        time.sleep(0.1)


def _show(made: GenerationView, ranks: tuple[RankKnobs, ...], as_json: bool) -> None:
    """Prints the generation. Exits with code 1 if not all ranks have agreed on it, or some have not answered yet."""
    output(made, as_json, lambda _: print_generation(made, ranks))
    if made.state not in ("committed", "applied"):
        sys.exit(1)


def _trial(steps: int | None, min_effect: float | None) -> CanaryRequest | None:
    if steps is None:
        if min_effect is not None:
            raise ConfigError("--min-effect is a setting of a canary: give --canary too.")
        return None
    return CanaryRequest(steps=steps, **({} if min_effect is None else {"min_effect": min_effect}))


def _parse_changes(words: list[str]) -> dict[str, KnobValue]:
    changes: dict[str, KnobValue] = {}
    if not words:
        raise ConfigError("No knob is given: give at least one, as in stride=3.")
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not KNOB=VALUE, as in stride=3.")
        if name.strip() in changes:
            raise ConfigError(f"{name.strip()} is set twice ({' '.join(words)}): give one value.")
        changes[name.strip()] = knob_spec(name.strip()).parse(value.strip())
    return changes
