"""The command line `tidegate`. Commands import the packages that they need, so that `tidegate status` needs no
torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

import tidegate
from tidegate.cli import knobs, runs, tokens, watch
from tidegate.cli.calibrate import calibrate
from tidegate.cli.doctor import checkpoint_files, storage_paths
from tidegate.cli.doctor.machine import Finding, examine, print_findings
from tidegate.cli.options import Daemon, Json, RunOption, choose_run, client_for, duration, utf8
from tidegate.cli.plan import plan
from tidegate.cli.rules import rules
from tidegate.cli.training import needs, training_command
from tidegate.client.discovery import find_daemon, state_dir
from tidegate.errors import ConfigError, TidegateError
from tidegate.logs import VARIABLE, LogFormat, configure, visible_without_handlers
from tidegate.terminal import confirm, say

app = typer.Typer(
    name="tidegate",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)
app.add_typer(knobs.app, name="knobs")
app.add_typer(runs.app, name="runs")
app.add_typer(tokens.app, name="token")


def main() -> NoReturn:
    """Runs the command line. Exit codes: 0 done, 1 failed, 2 wrong usage. Errors are one sentence on stderr."""
    visible_without_handlers()
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


def _print_version(asked: bool) -> None:
    if asked:
        say(f"tidegate {tidegate.__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Offloads optimizer state, shows its transfers, and changes its knobs while training runs."""


# ---- the daemon and the dashboard


@app.command()
def daemon(
    bind: Annotated[str, typer.Option(help="Address to listen on.", callback=utf8)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65_535)] = 8790,
    state: Annotated[Path | None, typer.Option("--state-dir", help="Folder of the tokens and the database.")] = None,
    tokens: Annotated[
        Path | None, typer.Option("--token-dir", help="Folder with SCOPE.token for every scope; read only.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="Any SQLAlchemy URL; default: SQLite.", callback=utf8)
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise-address", help="Name or address that other machines use for it.", callback=utf8),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="One more host name that requests may name; repeat it.", callback=utf8)
    ] = None,
    metrics: Annotated[bool, typer.Option(help="Serve /metrics.")] = True,
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of the log on stderr.", envvar=VARIABLE)
    ] = LogFormat.TEXT,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file: speak HTTPS with this certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key, if not in the same file.")] = None,
    keep_reports: Annotated[
        str, typer.Option(help="How long reported steps are kept, as in 12h; the newest of each rank stays.")
    ] = "7d",
    keep_runs: Annotated[str, typer.Option(help="How long runs are kept after their end, as in 30d.")] = "30d",
) -> None:
    """Run the control daemon until it is stopped by a signal."""
    with needs():
        from tidegate.daemon.configuration.settings import Settings
        from tidegate.daemon.server.main import serve
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
            tls_certificate=tls_certificate,
            tls_key=tls_key,
            keep_reports_seconds=duration(keep_reports, "--keep-reports"),
            keep_runs_seconds=duration(keep_runs, "--keep-runs"),
        )
    except ValidationError as error:
        raise ConfigError(f"The settings are not valid: {error.errors()[0]['msg']}.") from error
    configure(log_format)
    sys.exit(serve(settings))


@app.command()
def dashboard(
    port: Annotated[int, typer.Option(help="Port of the live view.", min=0, max=65_535)] = 8501,
    bind: Annotated[str, typer.Option(help="Address to listen on.", callback=utf8)] = "127.0.0.1",
    browse: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open a browser; default: where there is a terminal.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Print a link that opens, once, the live view that runs at --port.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="One more host name of the live view; repeat it.", callback=utf8)
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Show it to anybody who reaches the address, without link or token.")
    ] = False,
    url: Daemon = None,
) -> None:
    """Serve the live view, and print a link that signs a browser in."""
    with needs("dashboard"):
        import streamlit  # noqa: F401

        from tidegate.dashboard import address_of, launch, link_to, no_link, read_only, wants_browser
    if link:
        made = link_to(address_of(port, bind))
        if made is None:
            raise TidegateError(no_link())
        say(made)
        if only_looks := read_only():
            say(only_looks, file=sys.stderr)
        return
    browse = wants_browser() if browse is None else browse
    sys.exit(launch(port, url or find_daemon(), bind, browse, tuple(allowed_host or ()), public))


# ---- runs


for command in (watch.status, watch.events, knobs.history, knobs.rollback, knobs.advice):
    app.command()(command)


@app.command()
def trace(
    run: RunOption = None,
    rank: Annotated[int, typer.Option(help="Rank.", min=0)] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("trace.json"),
    url: Daemon = None,
) -> None:
    """Write the newest timeline of a rank (the ops of one step) to a trace file for Perfetto or chrome://tracing."""
    from tidegate.timeline.chrome_trace import write_trace
    from tidegate.wire.translation import as_timeline

    with client_for("read", url) as client:
        name = choose_run(client, run).run
        view = client.timeline(name, rank)
    if view is None:
        raise TidegateError(f"Rank {rank} of run {name!r} has not sent a timeline yet: wait for its next step.")
    try:
        write_trace(output, [as_timeline(view)], rank=rank, process_name=f"{name} rank {rank}")
    except OSError as error:
        raise TidegateError(f"{output} cannot be written: {error.strerror}.") from error
    say(f"Step {view.step} of run {name!r}, rank {rank}: {len(view.spans)} of {view.num_spans} spans in {output}.")


@app.command()
def doctor(
    path: Annotated[
        list[str] | None,
        typer.Option("--path", help="A directory or s3://bucket/prefix of storage paths, without a name; repeat it."),
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="The server of s3:// paths, where not Amazon's.", callback=utf8)
    ] = "",
    checkpoints: Annotated[
        list[str] | None,
        typer.Option("--checkpoints", help="A directory of checkpoints: each is read and checked; repeat it."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove what dead runs left on --path, and damaged --checkpoints.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before removing.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Test only the GPU: driver, context, pinned memory, Triton, copies, NVML.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="A daemon's state directory: rows that cannot be read are moved away."),
    ] = None,
    url: Daemon = None,
    as_json: Json = False,
) -> None:
    """Check what this machine has, whether the daemon can be reached, whether storage paths work and what runs have
    left there, and whether checkpoints and a daemon's state are sound."""
    if remove and not (path or checkpoints):
        raise ConfigError("--remove needs the place to remove from: --path DIRECTORY, or --checkpoints DIRECTORY.")
    for option, given in (("--gpu", gpu), ("--state", state is not None)):
        if given and (path or checkpoints):
            raise ConfigError(f"{option} cannot be combined with --path or --checkpoints: give them one at a time.")
    if gpu:
        with needs("agent"):
            from tidegate.cli.doctor.gpu import examine_gpu, lines
        _print_findings(examine_gpu(), as_json, lambda found: say("\n".join(lines(found))))
        return
    if state is not None:
        with needs():
            from tidegate.cli.doctor.daemon_state import examine_state
        _print_findings(examine_state(state), as_json, print_findings)
        return
    inspected = checkpoint_files.inspect_checkpoints(checkpoints or [])
    findings: list[Finding] = [] if remove else examine(url or find_daemon())
    if path:
        findings += (
            storage_paths.remove_dead(path, endpoint, yes, confirm)
            if remove
            else storage_paths.examine_paths(path, endpoint)
        )
    if checkpoints:
        findings += (
            checkpoint_files.remove_damaged(inspected, yes, confirm)
            if remove
            else checkpoint_files.findings(checkpoints, inspected)
        )
    _print_findings(findings, as_json, print_findings)


def _print_findings(findings: list[Finding], as_json: bool, as_text: Callable[[list[Finding]], None]) -> None:
    """Prints the findings with `as_text` or as JSON. Exit code 1 if one of them is bad."""
    if as_json:
        say(json.dumps([finding.as_dict() for finding in findings]))
    else:
        as_text(findings)
    if any(finding.verdict == "bad" for finding in findings):
        sys.exit(1)


# ---- this machine


app.command("calibrate")(calibrate)
app.command("plan")(plan)
app.command("rules")(rules)


# ---- training


train = app.command("train")(training_command(view=False))
demo = app.command("demo")(training_command(view=True))


def _fail(sentence: str, code: int) -> NoReturn:
    say(f"tidegate: {sentence}", file=sys.stderr)
    sys.exit(code)
