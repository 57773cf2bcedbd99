"""`tidegate runs delete`: deletes runs that have ended, after a confirmation."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tidegate.cli.options import Daemon, Reason, client_for
from tidegate.errors import ConfigError
from tidegate.terminal import say

app = typer.Typer(help="Delete runs that ended.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Delete runs that ended."""


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="RUN...")],
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    url: Daemon = None,
) -> None:
    """Delete ended runs permanently: generations, ranks, steps and alerts. Their rows in the audit log are kept."""
    listed = ", ".join(names)
    if not yes and not sys.stdin.isatty():
        raise ConfigError(f"Nothing was deleted: there is no terminal to ask on. Add --yes to delete {listed}.")
    with client_for("operate", url) as client:
        for name in names:
            client.run(name)  # NotFound for an unknown name, before any run is deleted
        if not yes and not typer.confirm(f"Delete {listed}, for good?"):
            say("Nothing was deleted.")
            return
        for name in names:
            client.delete_run(name, reason)
            say(f"Run {name!r} is deleted.")
