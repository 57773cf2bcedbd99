"""Writes the reference pages that are made from the code: knobs, command line and REST interface, in `docs/reference/`.

`python -m docs.write_reference` writes them; with `--check` it fails where a page is not what the code gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer

from docs.generated import run
from tidegate.cli.main import app
from tidegate.knobs.knobs import PATH_KNOBS, SPECS

DOCS: Final = Path(__file__).resolve().parent
MADE: Final = "<!-- Made by `python -m docs.write_reference` from {}. -->\n"

KNOBS: Final = """
A knob is a setting that can change while training runs. All ranks apply a change between the same two steps, or no
rank does. [Tune a run](../guides/tune-a-run.md) shows how to change one. [Concepts](../concepts.md) shows what they do.

`auto` means that Tidegate chooses the value: the tuner moves `stride`, `order` and `host_cache`, and `tier_split`
follows the measured speeds of the paths. Any other value is pinned: it stays as it is.
"""
COMMANDS: Final = """
Every command ends with one of these exit codes: 0 done, 1 failed, 2 wrong usage. Errors are one sentence on stderr.
Commands that print a result take `--json`, for programs. Times are in UTC, as the `Z` at their end says. `tidegate
--version` prints the version.
"""
REST: Final = """
One daemon serves this interface for any number of runs. `http://127.0.0.1:8790` is its address unless it was started
with another one. [The control daemon](../control.md) explains how changes are decided, which token may do what, and
which limits hold.

- [openapi.json](../openapi.json) describes every route, message and error for programs.
- `/docs` of a running daemon shows the same as a page, on which routes can be tried.
- Errors are problem details (RFC 9457). The field `detail` names the value, the bound and the remedy.
- A token is sent as `Authorization: Bearer TOKEN`. "none" in the table: the route needs no token.
"""


def knobs() -> Iterator[str]:
    yield "# Knobs\n"
    yield MADE.format("`tidegate/knobs/knobs.py`") + KNOBS
    yield "| knob | what it sets | accepted values | unit |"
    yield "| --- | --- | --- | --- |"
    for name, spec in SPECS.items():
        yield f"| `{name}` | {spec.help} | {spec.bounds} | {spec.unit} |"
    names = ", ".join(f"`{name}`" for name in PATH_KNOBS)
    yield f"\nOnly runs with storage paths have {names}. `static_ratio` has no `auto`: the model advises a value."


def command_line() -> Iterator[str]:
    yield "# Command line\n"
    yield MADE.format("`tidegate/cli/main.py`") + COMMANDS
    group: Any = typer.main.get_command(app)
    yield from _commands("tidegate", group)


def _commands(name: str, group: Any) -> Iterator[str]:
    for word, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _commands(f"{name} {word}", command)
            continue
        yield f"## {name} {word}\n"
        yield f"{_one_line(command.help)}\n"
        yield "| argument or option | meaning | default |"
        yield "| --- | --- | --- |"
        for parameter in command.params:
            if "--help" not in parameter.opts:
                yield _parameter(parameter)
        yield ""


def _parameter(parameter: Any) -> str:
    """The row of an argument or an option."""
    if parameter.param_type_name == "argument":
        shown = parameter.metavar or parameter.name.upper()
    else:
        shown = " / ".join((", ".join(parameter.opts), *parameter.secondary_opts))
    default = parameter.default
    if default is None or default is False or default == "":
        known = "required" if parameter.required else ""
    else:
        known = f"`{getattr(default, 'value', default)}`"
    repeat = " May be given several times." if parameter.multiple and "repeat it" not in (parameter.help or "") else ""
    return f"| `{shown}` | {_one_line(parameter.help or '')}{repeat} | {known} |"


def rest() -> Iterator[str]:
    yield "# REST interface\n"
    yield MADE.format("`docs/openapi.json`") + REST
    by_tag: dict[str, list[str]] = {}
    for path, methods in json.loads((DOCS / "openapi.json").read_text())["paths"].items():
        for method, route in methods.items():
            what, _, token = _one_line(route["description"]).partition(" Token: ")
            row = f"| `{method.upper()} {path}` | {what} | {token.rstrip('.') or 'none'} |"
            by_tag.setdefault(route["tags"][0], []).append(row)
    for tag, rows in sorted(by_tag.items()):
        yield f"## {tag.capitalize()}\n"
        yield "| route | what it does | token |"
        yield "| --- | --- | --- |"
        yield from rows
        yield ""


def _one_line(words: str) -> str:
    return " ".join(words.split()).replace("|", r"\|")


PAGES: Final = {"knobs": knobs, "command-line": command_line, "rest": rest}


def files() -> dict[Path, str]:
    """The content of each page, by its path."""
    return {DOCS / "reference" / f"{name}.md": "\n".join(made()).rstrip() + "\n" for name, made in PAGES.items()}


def main(arguments: list[str]) -> int:
    return run("docs.write_reference", files, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
