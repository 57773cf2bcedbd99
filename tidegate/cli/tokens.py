"""`tidegate token create | list | revoke`: they use the database directly, so that they work with or without a running
daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from tidegate import units
from tidegate.cli.options import Json, duration, utf8
from tidegate.cli.training import needs
from tidegate.client.discovery import SCOPES, state_dir
from tidegate.client.transport import actor
from tidegate.errors import ConfigError, DaemonError, TidegateError
from tidegate.terminal import say
from tidegate.wire.base import RunName

if TYPE_CHECKING:
    from tidegate.daemon.storage.token_table import StoredToken, TokenTable

app = typer.Typer(help="Make, list and revoke the tokens of a daemon.", no_args_is_help=True)

State = Annotated[Path | None, typer.Option("--state-dir", help="State directory of the daemon.")]
Database = Annotated[
    str | None, typer.Option("--database-url", help="The daemon's database, if not SQLite.", callback=utf8)
]


@app.command()
def create(
    scope: Annotated[str, typer.Argument(help=f"One of: {', '.join(SCOPES)}.")],
    name: Annotated[str | None, typer.Option(help="Name of its owner, for the audit log.", callback=utf8)] = None,
    run: Annotated[str | None, typer.Option(help="The only run for which it is valid.", callback=utf8)] = None,
    expires: Annotated[str | None, typer.Option(help="How long it is valid, as in 12h or 30d.")] = None,
    state: State = None,
    database_url: Database = None,
) -> None:
    """Make a token and print it. It cannot be printed again later. A running daemon accepts the token after at most a
    fifth of a second."""
    found = next((known for known in SCOPES if known == scope), None)
    if found is None:
        raise ConfigError(f"There is no scope {scope!r}. The scopes are: {', '.join(SCOPES)}.")
    if run is not None and found == "alert":
        raise ConfigError(
            "--run cannot be combined with scope alert, because alerts are not sent for a single run: leave out --run."
        )
    if run is not None:
        _check_run(run)
    ends = time.time() + duration(expires, "--expires") if expires is not None else None
    with _tokens(state, database_url, "No token was made") as tokens:
        say(tokens.issue(found, (name or scope)[:64], run=run, expires_at=ends, actor=actor()))


@app.command("list")
def show(state: State = None, database_url: Database = None, as_json: Json = False) -> None:
    """List the tokens: scope, run and expiry. The secret values of tokens are not stored."""
    with _tokens(state, database_url, "Nothing can be listed") as tokens:
        rows = [_row(token) for token in tokens.all()]
    if as_json:
        say(json.dumps(rows))
        return
    from tidegate.cli.tables import table

    columns = ("id", "scope", "run", "name", "made", "ends", "state")
    table(columns, [tuple(_cell(row[column]) for column in columns) for row in rows])


@app.command()
def revoke(
    id: Annotated[str, typer.Argument(help="The beginning of its id, from `tidegate token list`.", callback=utf8)],
    state: State = None,
    database_url: Database = None,
) -> None:
    """Revoke a token permanently. A running daemon refuses it within two seconds."""
    with _tokens(state, database_url, "Nothing was revoked, the token stays valid") as tokens:
        revoked = tokens.revoke(id, actor())
    if revoked is None:
        raise TidegateError(
            f"No token, or more than one, has an id that begins with {id!r}: nothing was revoked. See "
            "`tidegate token list`."
        )
    say(f"Token {revoked.id} ({revoked.scope}, {revoked.name}) is revoked.")


@contextmanager
def _tokens(state: Path | None, database_url: str | None, undone: str) -> Iterator[TokenTable]:
    """Context manager that opens the daemon's database and gives its token table.

    undone: sentence for error messages that says what was not done, such as `No token was made`.
    """
    with needs():
        from tidegate.daemon.configuration.settings import Settings
        from tidegate.daemon.storage.database_file import database_errors_explained
        from tidegate.daemon.storage.store import Store
    settings = Settings(state_dir=(state or state_dir()).expanduser().absolute(), database_url=database_url)
    if database_url is None and not settings.database.is_file():
        raise ConfigError(
            f"There is no database of a daemon at {settings.database}: give the daemon's state directory with "
            "--state-dir or TIDEGATE_STATE_DIR, or its --database-url. A daemon makes its database at its first start."
        )
    try:
        store = Store(settings.url)
    except DaemonError as error:
        raise DaemonError(f"{error} {undone}.") from error
    try:
        with database_errors_explained(undone):
            yield store.tokens
    finally:
        store.close()


def _row(token: StoredToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "scope": token.scope,
        "run": token.run,
        "name": token.name,
        "made": token.created_at,
        "ends": token.expires_at,
        "state": token.state(time.time()),
    }


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return units.moment(value)
    return value or ""


def _check_run(name: str) -> None:
    try:
        TypeAdapter(RunName).validate_python(name)
    except ValidationError as error:
        raise ConfigError(
            f"{name!r} cannot be the name of a run: use 1 to 64 letters, digits, '.', '_' and '-', with a letter or "
            "digit first."
        ) from error
