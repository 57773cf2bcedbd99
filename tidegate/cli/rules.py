"""The command `tidegate rules`: it writes the configuration of Prometheus and Alertmanager of this version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

import tidegate
from tidegate.cli.options import utf8
from tidegate.errors import ConfigError, TidegateError
from tidegate.terminal import say

SOURCE: Final = Path(tidegate.__file__).parent / "grafana" / "prometheus"
_RUNBOOK: Final = re.compile(r"(?<=runbook_url: )docs/runbooks/(\w+)\.md")


def rules(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write into; it is made if it is missing.")],
    runbooks: Annotated[
        str | None,
        typer.Option(
            help="Address of the folder of runbooks on your HTML copy of the documentation; each alert then has a link "
            "to its page there, ADDRESS/NAME.html.",
            callback=utf8,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite files that are there.")] = False,
) -> None:
    """Write prometheus.yml, alertmanager.yml and the alert rules of this version."""
    if runbooks is not None and not re.fullmatch(r"https?://[^\s\"'\\{}#]+", runbooks):
        raise ConfigError(f"--runbooks is an address that begins with https:// or http://, not {runbooks!r}.")
    files = {output / path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.yml"))}
    there = [str(path) for path in files if path.exists()]
    if there and not overwrite:
        raise TidegateError(f"These files exist already; --overwrite replaces them: {', '.join(there)}.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if runbooks is None else _linked(text, runbooks.rstrip("/")))
    except OSError as error:
        raise TidegateError(f"{error.filename} cannot be written: {error.strerror}.") from error
    say("\n".join(map(str, files)))
    if runbooks is None:
        say("Alerts have no link to their runbook; --runbooks gives them one.")


def _linked(text: str, runbooks: str) -> str:
    return _RUNBOOK.sub(lambda found: f"{runbooks}/{found[1]}.html", text)
