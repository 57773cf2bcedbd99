"""The state directory: whose it must be, what is in it, and what happens when it goes or its disk is full."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.daemon.live import ROOT, Agent, Daemon, Process, environment, file_tokens, new_run, threaded, wait_until
from tidegate.client.discovery import SCOPES, find_daemon, find_token
from tidegate.client.state_files import OWN_FOLDER
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.app import create_app
from tidegate.daemon.storage.state_directory import exclusive, prepare, write_private
from tidegate.errors import DaemonError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def refused(state: Path) -> str:
    """What a daemon says that cannot start there."""
    with Process(state) as process, pytest.raises(AssertionError) as error:
        process.start(keep=True)
    assert process.process is not None
    assert process.process.returncode == 1
    assert "Traceback" not in str(error.value)
    return str(error.value)


# ---- whose it is


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755, 0o2775])
def test_a_directory_that_others_may_enter_gets_a_folder_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(mode)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(volume))
    for name in ("TIDEGATE_DAEMON", "TIDEGATE_TOKEN", "TIDEGATE_OPERATE_TOKEN", "TIDEGATE_TOKEN_DIR"):
        monkeypatch.delenv(name, raising=False)
    with threaded(volume) as daemon:
        own = volume / OWN_FOLDER
        assert [path.name for path in volume.iterdir()] == [OWN_FOLDER]
        assert stat.S_IMODE(own.stat().st_mode) & 0o777 == 0o700
        assert stat.S_IMODE((own / "tidegate.db").stat().st_mode) == 0o600
        assert find_token("operate") == daemon.tokens["operate"]
        write_private(own / "daemon.json", json.dumps({"url": daemon.url}))
        assert find_daemon() == daemon.url
    assert stat.S_IMODE(volume.stat().st_mode) == mode, "it is left as it is"


@as_root
def test_a_volume_of_root_serves_a_daemon_of_another_user() -> None:
    code = (
        "import os, sys; from pathlib import Path; from tidegate.daemon.storage.state_directory import prepare; "
        f"os.setuid({NOBODY}); print(prepare(Path(sys.argv[1])))"
    )
    with tempfile.TemporaryDirectory() as volume:  # where another user may go
        os.chmod(volume, 0o777)
        own = Path(volume) / OWN_FOLDER
        done = subprocess.run(
            [sys.executable, "-c", code, volume], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == str(own), done.stderr
        assert (own.stat().st_uid, stat.S_IMODE(own.stat().st_mode)) == (NOBODY, 0o700)


def foreign(own: Path) -> None:
    own.mkdir(mode=0o700)
    os.chown(own, NOBODY, NOBODY)


def open_to_all(own: Path) -> None:
    own.mkdir()
    own.chmod(0o770)


def linked(own: Path) -> None:
    (own.parent.parent / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(own.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(foreign, "belongs to user nobody", marks=as_root),
        (open_to_all, "has mode 0770: other users"),
        (linked, "is not a folder"),
        (Path.touch, "is not a folder"),
    ],
)
def test_a_folder_of_our_own_that_is_foreign_or_open_is_refused(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    make(volume / OWN_FOLDER)
    assert said in refused(volume)


def test_what_an_earlier_version_left_in_an_open_directory_is_moved_once(tmp_path: Path) -> None:
    volume, run = tmp_path / "volume", new_run()
    with threaded(volume) as daemon:
        Agent(daemon, run)
        tokens = daemon.tokens
    volume.chmod(0o777)
    for _ in range(2):
        with threaded(volume) as daemon:
            assert [path.name for path in volume.glob("t*")] == []
            assert daemon.tokens == tokens
            assert [view.run for view in daemon.client().runs()] == [run]


def test_nothing_is_moved_while_an_earlier_daemon_uses_it(tmp_path: Path) -> None:
    with threaded(tmp_path):
        pass
    tmp_path.chmod(0o755)
    with exclusive(tmp_path), pytest.raises(DaemonError, match="Another daemon"):
        prepare(tmp_path)
    assert (tmp_path / "tidegate.db").is_file()


def test_links_in_an_open_directory_are_not_moved(tmp_path: Path) -> None:
    volume, target = tmp_path / "volume", tmp_path / "target"
    volume.mkdir()
    volume.chmod(0o777)
    target.write_text("secret\n")
    (volume / "operate.token").symlink_to(target)
    assert "operate.token is a link or belongs to user" in refused(volume)


# ---- its files


def test_a_linked_token_file_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "key-of-somebody"
    state.mkdir(mode=0o700)
    target.write_text("not-a-token\n")
    target.chmod(0o644)
    (state / "operate.token").symlink_to(target)
    assert "operate.token is a symbolic link" in refused(state)
    assert (stat.S_IMODE(target.stat().st_mode), target.read_text()) == (0o644, "not-a-token\n")


def test_a_client_takes_no_token_from_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_TOKEN", "TIDEGATE_OPERATE_TOKEN", "TIDEGATE_TOKEN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "state" / "operate.token").symlink_to(tmp_path / "secret")
    assert find_token("operate") is None


@as_root
def test_a_token_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.token").write_text("known-to-nobody\n")
    os.chown(tmp_path / "agent.token", NOBODY, NOBODY)
    with pytest.raises(DaemonError, match=r"agent\.token belongs to user nobody"):
        create_app(Settings(state_dir=tmp_path))


def test_a_token_file_that_others_can_read_is_written_anew(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        tokens = daemon.tokens
    path = tmp_path / "operate.token"
    os.link(path, tmp_path / "other-name")
    path.chmod(0o644)
    with threaded(tmp_path) as daemon:
        assert daemon.tokens == tokens
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "other-name").stat().st_mode) == 0o644, "no mode was changed: the file is a new one"


def test_the_address_is_written_through_no_link(tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "target"
    state.mkdir(mode=0o700)
    target.write_text("as it was")
    (state / "daemon.tmp").symlink_to(target)
    (state / "daemon.json").symlink_to(target)
    with Process(state) as process:
        command = [sys.executable, "-m", "tidegate", "daemon", "--state-dir", str(state), "--port", "0"]
        process.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(state), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        wait_until(lambda: not (state / "daemon.json").is_symlink(), "daemon.json", 30)
        assert stat.S_IMODE((state / "daemon.json").stat().st_mode) == 0o600
        assert target.read_text() == "as it was"
        process.end(signal.SIGTERM)
    assert not (state / "daemon.json").exists()
    assert not list(state.glob(".*")), "no draft is left"


# ---- the database


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The state of a daemon that was killed, with a run."""
    with Process(tmp_path / "state") as process:
        agent = Agent(process.start(), "llama").begin()
        agent.train(40, 1.0)
        agent.client.goodbye(agent.id)
        process.end(signal.SIGTERM)
    return tmp_path / "state"


@pytest.mark.parametrize("how", ["emptied", "deleted", "without tables"])
def test_a_database_that_was_lost_is_not_replaced_in_silence(used: Path, how: str) -> None:
    database = used / "tidegate.db"
    database.unlink()
    if how == "emptied":
        database.touch()
    elif how == "without tables":
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute("CREATE TABLE other (a)")
    before = database.read_bytes() if database.exists() else None
    said = refused(used)
    assert "earlier it existed: restore a backup" in said
    assert f"remove {used / 'database.made'} by hand" in said
    if how != "without tables":
        assert (database.read_bytes() if database.exists() else None) == before
    (used / "database.made").unlink()
    database.unlink(missing_ok=True)
    tokens = file_tokens(used)
    with threaded(used) as daemon:
        assert daemon.client().runs() == []
        assert daemon.tokens == tokens


@pytest.mark.parametrize("content", [b"\0" * 4096, b"\xff" * 4096, os.urandom(4096)])
def test_an_overwritten_page_is_refused_at_start(used: Path, content: bytes) -> None:
    database = used / "tidegate.db"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'generations'").fetchone()
    with database.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(content)
    before = database.read_bytes()
    said = refused(used)
    assert f"{database} is damaged (" in said
    assert f"tidegate doctor --state {used}" in said
    assert database.read_bytes() == before


def test_what_is_no_database_is_refused(used: Path) -> None:
    (used / "tidegate.db").write_bytes(b"no database at all" * 1000)
    assert "is damaged (file is not a database)" in refused(used)


def test_a_state_from_before_the_marker_starts_and_gets_it(used: Path) -> None:
    (used / "database.made").unlink()
    with threaded(used) as daemon:
        assert [view.run for view in daemon.client().runs()] == ["llama"]
    assert (used / "database.made").read_text() == "tidegate.db\n"


# ---- while it runs


def patch(daemon: Daemon, run: str, stride: int) -> tuple[int, str, str]:
    body = {"changes": {"stride": stride}, "reason": "x" * 200}
    answer = daemon.http("PATCH", f"/v1/runs/{run}/knobs", json=body, headers={"If-Match": "*"})
    found = answer.json()
    return answer.status_code, found.get("type", ""), found.get("detail", "")


def ready(daemon: Daemon) -> tuple[int, str]:
    answer = daemon.http("GET", "/readyz", None)
    return answer.status_code, answer.json().get("detail", "")


def test_a_deleted_directory_is_told_and_takes_no_changes(tmp_path: Path) -> None:
    state, away = tmp_path / "state", tmp_path / "away"
    with Process(state) as process:
        daemon = process.start()
        Agent(daemon, "llama").client.goodbye(daemon.client().run("llama").ranks[0].agent)
        assert patch(daemon, "llama", 3)[0] in (200, 202)
        state.rename(away)
        for _ in range(3):
            code, kind, detail = patch(daemon, "llama", 4)
            assert (code, kind) == (503, "store-unusable"), detail
            assert "was deleted or replaced" in detail
        wait_until(lambda: ready(daemon)[0] == 503, "a daemon that is not ready")
        assert "was deleted or replaced" in ready(daemon)[1]
        assert daemon.http("GET", "/v1/runs/llama").status_code == 200, "what is known is told"
        assert not state.exists(), "no new database was made"
        away.rename(state)
        wait_until(lambda: ready(daemon)[0] == 200, "a daemon that is ready again")
        assert patch(daemon, "llama", 5)[0] in (200, 202)
        shutil.rmtree(state)
        assert patch(daemon, "llama", 6)[:2] == (503, "store-unusable")
        code, seconds, text = process.end(signal.SIGTERM)
        assert seconds < 20, text


@contextlib.contextmanager
def on_small_disk(folder: Path) -> Iterator[tuple[Daemon, Path]]:
    """A daemon whose state is on a tmpfs of 1 MiB, in a mount namespace of its own, and that folder from outside."""
    folder.mkdir(mode=0o700)
    mounted = 'mount -t tmpfs -o size=1m,mode=0700 none "$0" && exec "$@"'
    command = [sys.executable, "-m", "tidegate", "daemon", "--port", "0", "--state-dir", str(folder)]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", mounted, str(folder), *command],
        cwd=ROOT, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        seen = Path(f"/proc/{process.pid}/root") / folder.relative_to("/")
        wait_until(lambda: (seen / "daemon.json").exists() or process.poll() is not None, "daemon.json", 30)
        assert process.poll() is None, process.communicate()[0]
        url = json.loads((seen / "daemon.json").read_text())["url"]
        daemon = Daemon(url, seen, {scope: (seen / f"{scope}.token").read_text().strip() for scope in SCOPES})
        try:
            wait_until(daemon.client().health, "a ready daemon")
            yield daemon, seen
        finally:
            for client in daemon.clients:
                client.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root, unshare")
def test_a_full_disk_is_told_and_takes_no_changes(tmp_path: Path) -> None:
    with on_small_disk(tmp_path / "state") as (daemon, seen):
        agent = Agent(daemon, "llama")
        agent.client.goodbye(agent.id)
        assert patch(daemon, "llama", 3)[0] in (200, 202)
        with contextlib.suppress(OSError), (seen / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
        answers = [patch(daemon, "llama", 4 + n % 5) for n in range(50)]
        assert {code for code, _, _ in answers} <= {200, 202, 503}, answers
        code, kind, detail = answers[-1]
        assert (code, kind, "its disk is full" in detail) == (503, "store-unusable", True), detail
        wait_until(lambda: ready(daemon)[0] == 503, "a daemon that is not ready")
        assert "its disk is full" in ready(daemon)[1]
        newest = daemon.client().knobs("llama").generation
        assert newest == sum(code in (200, 202) for code, _, _ in answers) + 1, "what was refused was not decided"
        (seen / "fill").unlink()
        wait_until(lambda: ready(daemon)[0] == 200, "a daemon that is ready again")
        assert patch(daemon, "llama", 9)[0] in (200, 202)


COMMANDS_ON_A_FULL_DISK = """
import contextlib, io, json, pathlib, sqlite3, sys
from tidegate.cli.main import main
state, told = pathlib.Path(sys.argv[1]), []
def run(*words):
    sys.argv[1:] = [*words, "--state-dir", str(state)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main()
        except SystemExit as end:
            told.append([end.code, out.getvalue(), error.getvalue()])
with contextlib.closing(sqlite3.connect(state / "tidegate.db")) as opened:  # it has its log, as while a daemon runs
    (digest,) = opened.execute("SELECT digest FROM tokens").fetchone()
    with contextlib.suppress(OSError), (state / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    run("token", "create", "read")
    run("token", "revoke", digest)
    run("token", "list", "--json")
    run("daemon", "--port", "0")
    (state / "read.token").unlink()
    run("daemon", "--port", "0")
print(json.dumps(told))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root, unshare")
def test_commands_on_a_full_disk_say_what_was_not_done_and_what_to_do(tmp_path: Path) -> None:
    state, disk = tmp_path / "state", tmp_path / "disk"
    create_app(Settings(state_dir=state)).state.plane.store.close()
    disk.mkdir()
    mounted = 'mount -t tmpfs -o size=1m,mode=0700 none "$1" && cp -a "$0"/. "$1" && exec "$2" -c "$3" "$1"'
    words = ["unshare", "--mount", "sh", "-c", mounted, str(state), str(disk), sys.executable, COMMANDS_ON_A_FULL_DISK]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(disk), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    created, revoked, listed, started, without_token = json.loads(done.stdout)
    full = "The daemon's database cannot be used: its disk is full (SQLite says: database or disk is full)."
    assert created == [1, "", f"tidegate: {full} No token was made: make room on its disk, then try again.\n"]
    assert revoked == [
        1, "", f"tidegate: {full} Nothing was revoked, the token stays valid: make room on its disk, then try "
        "again.\n",
    ]  # fmt: skip
    assert {token["state"] for token in json.loads(listed[1])} == {"valid"}
    assert started == [
        1, "", f"tidegate: The daemon's address cannot be written to {disk}/daemon.json: No space left on device. Make "
        "room on its disk, then start the daemon again.\n",
    ]  # fmt: skip
    assert without_token == [
        1,
        "",
        f"tidegate: {full} The daemon has not started: make room on its disk, then try again.\n",
    ]


def test_who_asks_often_makes_few_writes(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        begun: list[object] = []
        engine = daemon.app.state.plane.store.engine
        for listened in (engine, daemon.app.state.plane.store.steps._engine):
            event.listen(listened, "begin", begun.append)
        for _ in range(50):
            assert ready(daemon)[0] == 200
        assert len(begun) < 40
