"""The command line. Parts are imported by the commands that need them, so that `tidegate status` runs anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from pydantic import BaseModel, ValidationError

from tidegate.cli_training import needs, training_command
from tidegate.client import SCOPES, DaemonClient, find_daemon, find_token, state_dir
from tidegate.errors import ConfigError, TidegateError
from tidegate.knobs import KnobValue
from tidegate.knobs import spec as knob_spec
from tidegate.logs import VARIABLE, LogFormat, configure

if TYPE_CHECKING:
    from tidegate.wire import RunView

app = typer.Typer(
    name="tidegate",
    help="Moves optimizer state between GPU, host and storage at the right moment, and shows where it went.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
knobs_app = typer.Typer(help="Read and turn the knobs of a run.", no_args_is_help=True)
app.add_typer(knobs_app, name="knobs")

Daemon = Annotated[str | None, typer.Option("--daemon", help="Address of the daemon; default: the one of this user.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Name of the run; not needed while only one is running.")]


def main() -> NoReturn:
    """Exit codes: 0 done, 1 failed, 2 used wrongly. Errors are one sentence on stderr."""
    try:
        app()
    except ConfigError as error:
        _fail(str(error), 2)
    except TidegateError as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # `tidegate … | head`
        sys.stderr.close()
        sys.exit(1)
    sys.exit(0)


# ---- the daemon and the screens


@app.command()
def daemon(
    bind: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65_535)] = 8790,
    state: Annotated[Path | None, typer.Option("--state-dir", help="Where tokens and the database live.")] = None,
    tokens: Annotated[
        Path | None, typer.Option("--token-dir", help="Holds read.token, operate.token and agent.token; not written.")
    ] = None,
    database_url: Annotated[str | None, typer.Option(help="Any SQLAlchemy URL; default: SQLite.")] = None,
    advertise: Annotated[str | None, typer.Option("--advertise-address", help="Its name on other machines.")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="One more Host header to accept.")] = None,
    metrics: Annotated[bool, typer.Option(help="Serve /metrics.")] = True,
    log_format: Annotated[LogFormat, typer.Option(help="Form of the log on stderr.", envvar=VARIABLE)] = LogFormat.TEXT,
) -> None:
    """Run the control daemon until it is told to stop."""
    with needs():
        from tidegate.daemon.main import serve
        from tidegate.daemon.settings import Settings
    try:
        settings = Settings(
            state_dir=(state or state_dir()).expanduser().absolute(),
            token_dir=tokens,
            database_url=database_url,
            bind=bind,
            port=port,
            advertise_address=advertise,
            allowed_hosts=tuple(allowed_host or ()),
            metrics=metrics,
        )
    except ValidationError as error:
        raise ConfigError(f"The settings are not valid: {error.errors()[0]['msg']}.") from error
    configure(log_format)
    sys.exit(serve(settings))


@app.command()
def token(
    scope: Annotated[str, typer.Argument(help=f"One of: {', '.join(SCOPES)}.")],
    name: Annotated[str | None, typer.Option(help="Whose it is, for the audit log.")] = None,
    state: Annotated[Path | None, typer.Option("--state-dir", help="State directory of the daemon.")] = None,
    database_url: Annotated[str | None, typer.Option(help="The daemon's database, if not SQLite.")] = None,
) -> None:
    """Make a token and print it, once. The running daemon knows it within two seconds."""
    found = next((known for known in SCOPES if known == scope), None)
    if found is None:
        raise ConfigError(f"There is no scope {scope!r}. The scopes are: {', '.join(SCOPES)}.")
    with needs():
        from tidegate.daemon.auth import make_token
        from tidegate.daemon.settings import Settings
    settings = Settings(state_dir=(state or state_dir()).expanduser().absolute(), database_url=database_url)
    print(make_token(settings, found, name or scope))


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(help="Port of the live view.", min=0, max=65_535)] = 8501,
    bind: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    url: Daemon = None,
) -> None:
    """Serve the live view."""
    with needs("dashboard"):
        import streamlit  # noqa: F401

        from tidegate.dashboard import launch
    sys.exit(launch(port, url or find_daemon(), bind))


# ---- runs


@app.command()
def status(run: RunOption = None, url: Daemon = None, as_json: Json = False) -> None:
    """Show the runs, their ranks and their last step."""
    with _client("read", url) as client:
        runs = [client.run(run)] if run else client.runs()
    if as_json:
        _print_json(runs)
        return
    from tidegate.cli_tables import print_runs

    print_runs(runs)


@knobs_app.command("get")
def knobs_get(
    run: Annotated[str | None, typer.Argument(help="Name of the run.")] = None,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Show the desired knobs, and what each rank has."""
    with _client("read", url) as client:
        view = client.knobs(_choose(client, run).run)
    if as_json:
        _print_json(view)
        return
    from tidegate.cli_tables import print_knobs

    print_knobs(view)


@knobs_app.command("set")
def knobs_set(
    changes: Annotated[list[str], typer.Argument(metavar="[RUN] KNOB=VALUE...")],
    run: RunOption = None,
    reason: Annotated[str, typer.Option(help="Why, for the audit log.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it would do.")] = False,
    generation: Annotated[int | None, typer.Option(help="Only if this still is the newest generation.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the outcome.", min=0, max=60)] = 10.0,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Change knobs while the run trains, as in `stride=3 static_ratio=0.25`: at all ranks, or at none."""
    if run is None and "=" not in changes[0]:
        run, changes = changes[0], changes[1:]
    wanted = _parse_changes(changes)
    from tidegate.cli_tables import print_generation, print_preview

    with _client("operate", url) as client:
        name = _choose(client, run).run
        seen = client.knobs(name).generation if generation is None else generation
        if dry_run:
            preview = client.preview_knobs(name, wanted, seen)
            _print_json(preview) if as_json else print_preview(preview)
            return
        made = client.set_knobs(name, wanted, generation=seen, reason=reason, wait=wait)
        ranks = client.knobs(name).ranks
    _print_json(made) if as_json else print_generation(made, ranks)
    if made.state not in ("committed", "applied"):
        sys.exit(1)


@app.command()
def generations(run: RunOption = None, url: Daemon = None, as_json: Json = False) -> None:
    """List every change of a run's knobs, and what became of it."""
    with _client("read", url) as client:
        found = client.generations(_choose(client, run).run)
    if as_json:
        _print_json(found)
        return
    from tidegate.cli_tables import print_generations

    print_generations(found)


@app.command()
def trace(
    run: RunOption = None,
    rank: Annotated[int, typer.Option(help="Rank.", min=0)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("trace.json"),
    url: Daemon = None,
) -> None:
    """Write the last update of a rank as a trace file, for Perfetto or chrome://tracing."""
    from tidegate.cli_trace import write

    with _client("read", url) as client:
        name = _choose(client, run).run
        view = client.timeline(name, rank)
    if view is None:
        raise TidegateError(f"Rank {rank} of run {name!r} has not sent a timeline yet: wait for its next step.")
    write(view, name, rank, output)
    print(f"Step {view.step} of run {name!r}, rank {rank}: {len(view.spans)} of {view.num_spans} spans in {output}.")


@app.command()
def doctor(
    path: Annotated[list[Path] | None, typer.Option("--path", help="A directory of storage paths; repeat it.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what dead runs left on --path.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before removing.")] = False,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Check what this machine has, whether the daemon can be reached, and what runs have left on storage paths."""
    from tidegate import doctor_paths
    from tidegate.doctor import examine, print_findings

    if remove and not path:
        raise ConfigError("Say where to remove what dead runs left: --path DIRECTORY.")
    leftovers = doctor_paths.look(path or [])
    if remove:
        findings = doctor_paths.remove_dead(leftovers, yes, typer.confirm)
    else:
        findings = examine(url or find_daemon()) + (doctor_paths.findings(path, leftovers) if path else [])
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings]))
    else:
        print_findings(findings)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(1)


# ---- training


train = app.command("train")(training_command(view=False))
demo = app.command("demo")(training_command(view=True))


# ---- what the commands share


def _client(scope: Literal["read", "operate"], url: str | None) -> DaemonClient:
    return DaemonClient(url or find_daemon(), find_token(scope))


def _choose(client: DaemonClient, name: str | None) -> RunView:
    """The run of that name, or the only one that is running."""
    if name:
        return client.run(name)
    runs = client.runs()
    running = [run for run in runs if run.liveness in ("live", "stale")]
    if len(running) == 1:
        return running[0]
    if running:
        raise ConfigError(f"Several runs are running, say which: {', '.join(run.run for run in running)}.")
    known = f" Earlier ones, by name: {', '.join(run.run for run in runs[-10:])}." if runs else ""
    raise TidegateError(f"No run is running.{known}")


def _parse_changes(words: list[str]) -> dict[str, KnobValue]:
    changes: dict[str, KnobValue] = {}
    if not words:
        raise ConfigError("Say what to change, as in stride=3.")
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not KNOB=VALUE, as in stride=3.")
        changes[name.strip()] = knob_spec(name.strip()).parse(value.strip())
    return changes


def _print_json(found: BaseModel | list[Any]) -> None:
    rows = [row.model_dump(mode="json") for row in found] if isinstance(found, list) else found.model_dump(mode="json")
    print(json.dumps(rows))


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"tidegate: {sentence}", file=sys.stderr)
    sys.exit(code)
