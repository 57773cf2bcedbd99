"""Who may do what: every route that the application has, with no token, a wrong one, and one of each scope."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.daemon.live import SCOPES, Daemon, threaded
from tidegate.client import DaemonClient, Scope, find_token
from tidegate.daemon.app import create_app
from tidegate.daemon.auth import FILED, scopes_allowed
from tidegate.daemon.settings import Settings
from tidegate.errors import DaemonError, NotAuthorized

OPEN = {"/healthz", "/readyz", "/metrics", "/sd"}
METHODS = ("get", "put", "post", "delete", "options", "head", "patch")
FILLED = {"{agent}": "nobody", "{run}": "nothing", "{rank}": "0"}


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    app = create_app(Settings(state_dir=tmp_path_factory.mktemp("routes")))
    app.state.plane.store.close()
    found = [(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item]
    return [*found, ("GET", "/v1/openapi.json"), ("GET", "/v1/nowhere"), ("POST", "/nowhere")]


def filled(path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    return path


def test_every_route(daemon: Daemon, routes: list[tuple[str, str]]) -> None:
    assert len(routes) >= 20
    for method, path in routes:
        allowed = set(SCOPES) | {"none", "wrong"}
        if path not in OPEN and method == "GET":
            allowed = {"read", "operate", "agent"}
        elif path not in OPEN:
            allowed = {"agent"} if path.startswith("/v1/agents") else {"operate"}
            allowed = {"alert"} if path == "/v1/alerts" else allowed
        for who in ("none", "wrong", *SCOPES):
            headers = {"Authorization": "Bearer tide_wrong"} if who == "wrong" else {}
            scope = who if who in SCOPES else None
            answer = daemon.http(method, filled(path), scope, headers=headers, params={"wait": 0})
            told = f"{who} {method} {path}: {answer.status_code} {answer.text[:200]}"
            if who in allowed:
                assert answer.status_code not in (401, 403), told
            else:
                assert answer.status_code == (403 if scope else 401), told
                assert answer.headers["content-type"] == "application/problem+json", told
                assert (answer.status_code == 401) == ("www-authenticate" in answer.headers), told


@pytest.mark.parametrize("header", ["", "Bearer", "Basic abc", "tide_x", "Bearer \u00e9\u00e9".encode()])
def test_odd_authorization(daemon: Daemon, header: str | bytes) -> None:
    assert daemon.http("GET", "/v1/runs", None, headers={"Authorization": header}).status_code == 401


@pytest.mark.parametrize("path", ["/v1/agentsx", "/v1/../v1/agents/x", "//v1/agents", "/v1/agents%2fx", "/V1/agents"])
def test_an_agent_reaches_only_its_own(path: str) -> None:
    """What is not exactly an agents' route asks for the operator."""
    assert scopes_allowed("PATCH", path) == frozenset[Scope]({"operate"})


def test_token_files_are_private_and_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with threaded(state) as daemon:
        first = dict(daemon.tokens)
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert {path.stem for path in state.glob("*.token")} == set(FILED) == set(SCOPES)
        assert len({first[scope] for scope in FILED}) == 4
        stored = b"".join(path.read_bytes() for path in state.glob("tidegate.db*"))
        for scope in FILED:
            assert stat.S_IMODE((state / f"{scope}.token").stat().st_mode) == 0o600
            assert first[scope].encode() not in stored
    (state / "agent.token").unlink()
    os.chmod(state / "operate.token", 0o644)
    with threaded(state) as daemon:
        assert daemon.tokens["operate"] == first["operate"]
        assert stat.S_IMODE((state / "operate.token").stat().st_mode) == 0o600
        assert daemon.tokens["agent"] != first["agent"]
        assert daemon.http("GET", "/v1/runs", "agent").status_code == 200


def test_tokens_that_are_mounted_are_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = tmp_path / "secrets"
    mounted.mkdir()
    with pytest.raises(DaemonError, match=r"read\.token cannot be read"):
        create_app(Settings(state_dir=tmp_path / "state", token_dir=mounted))
    for scope in FILED:
        (mounted / f"{scope}.token").write_text(f"given-{scope}\n" if scope != "agent" else "\n")
    with pytest.raises(DaemonError, match=r"agent\.token is empty"):
        create_app(Settings(state_dir=tmp_path / "state", token_dir=mounted))
    (mounted / "agent.token").write_text("given-agent")
    os.chmod(mounted / "agent.token", 0o444)
    create_app(Settings(state_dir=tmp_path / "state", token_dir=mounted)).state.plane.store.close()
    with threaded(tmp_path / "state") as daemon:
        assert daemon.http("GET", "/v1/runs", None, headers={"Authorization": "Bearer given-read"}).status_code == 200
    assert stat.S_IMODE((mounted / "agent.token").stat().st_mode) == 0o444
    monkeypatch.setenv("TIDEGATE_TOKEN_DIR", str(mounted))
    for name in ("TIDEGATE_AGENT_TOKEN", "TIDEGATE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert find_token("agent") == "given-agent"


def test_what_reads_finds_a_token_that_can_only_read(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for scope in ("READ_", ""):
        monkeypatch.delenv(f"TIDEGATE_{scope}TOKEN", raising=False)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(daemon.state))
    with DaemonClient(daemon.url, find_token("read")) as reader:
        reader.runs()
        with pytest.raises(NotAuthorized, match=r"scope read; PATCH .* needs operate"):
            reader.preview_knobs("nothing", {"stride": 2}, 0)


def test_a_state_directory_from_before_gets_its_read_token(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        first = dict(daemon.tokens)
    (tmp_path / "read.token").unlink()
    with threaded(tmp_path) as daemon:
        assert (daemon.tokens["operate"], daemon.tokens["agent"]) == (first["operate"], first["agent"])
        assert daemon.tokens["read"] != first["read"]
        assert daemon.http("GET", "/v1/runs", "read").status_code == 200


def test_a_token_outlives_a_lost_database(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        token = daemon.tokens["operate"]
    for path in tmp_path.glob("tidegate.db*"):
        path.unlink()
    with threaded(tmp_path) as daemon:
        assert daemon.tokens["operate"] == token
        assert daemon.http("GET", "/v1/runs").status_code == 200
