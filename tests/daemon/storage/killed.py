"""Opens a database again and again, each time killed one statement later, until it is done: `python … URL [v1]`.

Each time another process opens what was left. Prints the statements after which it was killed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine

from tidegate.daemon.storage.store import Store

KILLED = 9


def make_v1(path: Path) -> None:
    """A database of version 1 with a token."""
    config = Config()
    config.set_main_option("script_location", "tidegate.daemon.storage:migrations")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "v1")
        connection.exec_driver_sql("INSERT INTO tokens VALUES ('d', 'old', 'operate', 1.0)")
    engine.dispose()


def killed_after(number: int, path: Path) -> bool:
    """Opens it in a process that ends after so many statements; whether it ended so."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(_: Any, __: Any, statement: str, *___: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == number:
                print(statement.split("(")[0].strip().partition("\n")[0], flush=True)
                os._exit(KILLED)

        event.listen(Engine, "after_cursor_execute", count)
        Store(f"sqlite:///{path}").close()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def main(folder: Path, first: str) -> None:
    start = folder / "start.db"
    if first == "v1":
        make_v1(start)
    path, number = folder / "tidegate.db", 1
    while True:
        for left in folder.glob("tidegate.db*"):
            left.unlink()
        if start.exists():
            shutil.copy(start, path)
        killed = killed_after(number, path)
        store = Store(f"sqlite:///{path}")
        assert [token.name for token in store.tokens.all()] == (["old"] if start.exists() else [])
        assert store.runs() == []
        store.close()
        if not killed:
            return
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
