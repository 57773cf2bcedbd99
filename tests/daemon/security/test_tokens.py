"""Who may do what: every route that the application has, with every kind of caller that there is."""

from __future__ import annotations

import functools
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from tests.certificates import certificate_for
from tests.daemon.live import Agent, Daemon, Process, hello, new_run, threaded, wait_until
from tidegate.client.daemon_client import DaemonClient
from tidegate.client.discovery import SCOPES, find_token
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.security.failure_limiter import MAX_KEYS, FailureLimiter
from tidegate.daemon.security.tokens import UNKNOWN_REFRESH_SECONDS, Caller, Tokens
from tidegate.daemon.server.app import create_app
from tidegate.daemon.storage.store import Store
from tidegate.daemon.storage.token_table import StoredToken, digest_of
from tidegate.errors import DaemonError, DaemonUnreachable, NotAuthorized

FILLED = {"{agent}": "nobody", "{run}": "nothing", "{rank}": "0"}
OTHER = "-of-another-run"
BY_ANY_NAME = ("/healthz", "/readyz", "/metrics", "/v1/proof")


def routes(daemon: Daemon) -> list[tuple[str, str]]:
    """Every route that the application has, asked of the application, and some that it has not."""
    found = [
        (method, route.path)
        for route in _routes(daemon.app)
        for method in sorted(route.methods)
        if isinstance(route, Route)
    ]
    assert len(found) >= 20
    return [*found, ("GET", "/v1/nowhere"), ("POST", "/nowhere"), ("PUT", "/v1/runs/{run}/knobs")]


def _routes(app: Any) -> Iterator[Any]:
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        yield from inner.routes if inner is not None else [route]


def filled(path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    return path


def expected(method: str, path: str, who: str) -> int | None:
    """401, 403, or None where the caller comes through."""
    if (not path.startswith("/v1/") and path != "/nowhere") or path in ("/v1/openapi.json", "/v1/proof"):
        return None
    if who in ("none", "wrong", "expired", "revoked"):
        return 401
    scope, other = who.removesuffix(OTHER), who.endswith(OTHER)
    if method in ("GET", "HEAD"):
        allowed = {"read", "operate", "agent"}
    elif path == "/v1/alerts":
        allowed = {"alert"}
    else:
        allowed = {"agent"} if path.startswith("/v1/agents") else {"operate"}
    if scope not in allowed:
        return 403
    near = path == "/v1/runs" or path.startswith("/v1/agents")
    return 403 if other and not near else None


@pytest.fixture(scope="module")
def tokens(daemon: Daemon) -> dict[str, str]:
    """Every kind of caller that there is."""
    table, now = daemon.app.state.plane.store.tokens, time.time()
    expired, revoked = table.issue("operate", "old", expires_at=now - 1), table.issue("operate", "withdrawn")
    table.revoke(digest_of(revoked))
    others = {f"{scope}{OTHER}": table.issue(scope, scope, run="another") for scope in SCOPES}
    own = {scope: daemon.tokens[scope] for scope in SCOPES}  # other tests add tokens to this daemon and withdraw them
    made = {**own, **others, "expired": expired, "revoked": revoked, "wrong": "tide_wrong"}
    daemon.tokens.update(made)  # known to the daemon a fifth of a second from now at the latest
    wait_until(lambda: daemon.http("GET", "/v1/runs", f"read{OTHER}").status_code == 200, "the tokens")
    return made


def test_every_route_and_every_caller(daemon: Daemon, tokens: dict[str, str]) -> None:
    for method, path in routes(daemon):
        for who in ("none", *tokens):
            answer = daemon.http(method, filled(path), None if who == "none" else who, params={"wait": 0})
            refused, told = expected(method, path, who), f"{who} {method} {path}: {answer.status_code} {answer.text}"
            if refused is None:
                assert answer.status_code not in (401, 403), told
            else:
                assert answer.status_code == refused, told
                assert answer.headers["content-type"] == "application/problem+json", told
                assert (refused == 401) == ("www-authenticate" in answer.headers), told
            assert not [name for name in answer.headers if name.startswith("access-control")], told


def test_a_web_page_gets_nothing(daemon: Daemon) -> None:
    """What a browser sends for a page of another origin, or for a name that was bent to this address."""
    bearer = {"Authorization": f"Bearer {daemon.tokens['operate']}"}
    for method, path in routes(daemon):
        page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        for headers in ({"Origin": "null"}, page, {**page, **bearer}):
            answer = daemon.http(method, filled(path), None, headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (403, "application/problem+json"), path
        bent = {"Host": "evil.example", "Origin": "http://evil.example", **bearer}
        assert daemon.http(method, filled(path), None, headers=bent).status_code == 400, path
        if path not in BY_ANY_NAME:
            del bent["Origin"]
            assert daemon.http(method, filled(path), None, headers=bent).status_code == 400, path
        preflight = {**page, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": "authorization"}
        answer = daemon.http("OPTIONS", filled(path), None, headers=preflight)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
    own = {"Origin": daemon.url, **bearer}
    assert daemon.http("GET", "/v1/runs", None, headers=own).status_code == 200


def test_a_token_of_one_run_sees_and_moves_no_other(daemon: Daemon) -> None:
    mine, other = new_run(), new_run()
    table = daemon.app.state.plane.store.tokens
    for scope in ("operate", "agent"):
        daemon.tokens[f"{scope} of mine"] = table.issue(scope, scope, run=mine)
    wait_until(lambda: daemon.http("GET", "/v1/runs", "operate of mine").status_code == 200, "the token")
    agents = {run: Agent(daemon, run) for run in (mine, other)}
    assert [row["run"] for row in daemon.http("GET", "/v1/runs", "operate of mine").json()] == [mine]
    assert daemon.http("GET", f"/v1/runs/{mine}/knobs", "operate of mine").status_code == 200
    assert daemon.http("GET", f"/v1/runs/{other}/knobs", "operate of mine").json()["type"] == "wrong-run"
    assert daemon.http("PATCH", f"/v1/runs/{other}/knobs", "operate of mine").json()["type"] == "wrong-run"
    said = {"timestamp": 1.0, "step": 1, "phase": "update", "generation": 0, "effective": {}}
    for run, status in ((mine, 200), (other, 403)):
        at = f"/v1/agents/{agents[run].id}"
        assert daemon.http("POST", f"{at}/reports", "agent of mine", json=said).status_code == status
        assert daemon.http("GET", f"{at}/directive", "agent of mine").status_code == status
        vote = {"generation": 9, "can": True}
        assert daemon.http("POST", f"{at}/votes", "agent of mine", json=vote).status_code == status
        assert daemon.http("DELETE", at, "agent of mine").status_code in ({204} if status == 200 else {403})
        body = hello(run, 1).model_dump(mode="json")
        assert daemon.http("POST", "/v1/agents", "agent of mine", json=body).status_code == (
            201 if run == mine else 403
        )


@pytest.mark.parametrize("end", ["withdrawn", "expired"])
@pytest.mark.parametrize("route", ["directive", "votes"])
def test_a_poll_ends_with_its_token(tmp_path: Path, route: str, end: str) -> None:
    with threaded(tmp_path / "state", proposal_seconds=60.0) as daemon:
        made, other = Agent(daemon, "llama"), Agent(daemon, "llama", 1)
        table = daemon.app.state.plane.store.tokens
        token = table.issue("agent", "guest", expires_at=time.time() + 4.0 if end == "expired" else None)
        daemon.tokens["guest"] = token
        wait_until(lambda: daemon.http("GET", "/v1/runs", "guest").status_code == 200, "the token")
        if route == "votes":
            answer = daemon.http(
                "PATCH", "/v1/runs/llama/knobs", json={"changes": {"stride": 5.0}}, headers={"If-Match": "*"}
            )
            assert answer.status_code == 202, answer.text
        with ThreadPoolExecutor(1) as pool:
            at, vote = f"/v1/agents/{made.id}/{route}?wait=30", {"generation": 1, "can": True}
            if route == "directive":
                at += "&committed=0"
            more = {"json": vote} if route == "votes" else {}
            begin = time.monotonic()
            poll = pool.submit(daemon.http, "POST" if more else "GET", at, "guest", **more)
            if end == "withdrawn":
                time.sleep(0.5)
                table.revoke(next(row.id for row in table.all() if row.name == "guest"))
            answer = poll.result()
        assert (answer.status_code, answer.json()["type"]) == (401, "token-ended")
        assert time.monotonic() - begin < 20.0
        assert other.id


def test_a_new_token_is_known_at_once_and_unknown_ones_are_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes a token and uses it is not refused, and does not use up what is forgiven to an address."""
    store = Store(f"sqlite:///{tmp_path / 'tidegate.db'}")
    now, reads = 100.0, 0
    read_all = store.tokens.all

    def counted() -> list[StoredToken]:
        nonlocal reads
        reads += 1
        return read_all()

    monkeypatch.setattr(store.tokens, "all", counted)
    tokens = Tokens(store, clock=lambda: now)
    assert tokens.check("unknown") == "wrong"
    now += UNKNOWN_REFRESH_SECONDS
    made = store.tokens.issue("operate", "new")
    assert tokens.check(made) == Caller("new", "operate")
    reads = 0
    for _ in range(1000):
        assert tokens.check("unknown") == "wrong"
    assert reads == 0
    now += UNKNOWN_REFRESH_SECONDS
    assert tokens.check(made) == Caller("new", "operate")
    assert reads == 0
    store.close()


def test_an_expired_token_was_good_until_then(tmp_path: Path) -> None:
    store, now = Store(f"sqlite:///{tmp_path / 'tidegate.db'}"), 1000.0
    token = store.tokens.issue("read", "guest", expires_at=1010.0)
    tokens = Tokens(store, wall=lambda: now)
    assert tokens.check(token) == Caller("guest", "read")
    now = 1010.0
    assert tokens.check(token) == "expired"
    store.close()


def test_waiting_requests_are_woken_when_their_token_ends_and_cost_one_check_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now, checked = Store(f"sqlite:///{tmp_path / 'tidegate.db'}"), 1000.0, list[str]()
    lasting, ending = store.tokens.issue("read", "a"), store.tokens.issue("read", "b", expires_at=1010.0)
    tokens = Tokens(store, wall=lambda: now)
    check = tokens.check
    monkeypatch.setattr(tokens, "check", lambda token: checked.append(token) or check(token))
    woken = list[str]()
    with ExitStack() as waiting:
        for number in range(100):
            token = ending if number % 2 else lasting
            waiting.enter_context(tokens.call_at_end(token, functools.partial(woken.append, token)))
        with tokens.call_at_end(ending, lambda: woken.append("gone")):
            pass
        tokens.check_waiting()
        assert (sorted(checked), woken) == (sorted([lasting, ending]), [])
        now = 1010.0
        tokens.check_waiting()
        assert woken == [ending] * 50
    checked.clear()
    tokens.check_waiting()
    assert checked == [], "no request waits any more"
    store.close()


def test_failures_are_held_up_and_good_tokens_are_not(tmp_path: Path) -> None:
    with threaded(tmp_path, forgiven_failures=5) as daemon:
        wrong = {"Authorization": "Bearer tide_wrong"}
        found = [daemon.http("GET", "/v1/runs", None, headers=wrong).status_code for _ in range(7)]
        assert found == [401] * 5 + [429] * 2
        another = daemon.http("GET", "/v1/runs", None, headers={"Authorization": "Bearer tide_other"})
        assert (another.status_code, another.json()["type"]) == (429, "too-many-failures"), "it is the same address"
        assert 0 < int(another.headers["retry-after"]) <= 4
        assert daemon.http("GET", "/v1/runs").status_code == 200
        found = [daemon.http("POST", "/v1/agents", "read").status_code for _ in range(7)]
        assert found == [403] * 5 + [429] * 2, "its scope is wrong again and again"
        assert daemon.http("POST", "/v1/agents", "operate").status_code == 403, "another token of that address"


def test_failures_are_forgotten_and_bounded() -> None:
    now = 0.0
    failures = FailureLimiter(2, clock=lambda: now)
    assert [failures.count("a") for _ in range(3)] == [0, 0, 3]
    now = 3.0
    assert [failures.count("a"), failures.count("a")] == [0, 3]
    for number in range(MAX_KEYS + 1):
        failures.count(f"b{number}")
    assert len(failures._buckets) == MAX_KEYS


def test_nothing_secret_in_logs_or_metrics(tmp_path: Path) -> None:
    with Process(tmp_path) as process:
        daemon = process.start()
        secrets = {**daemon.tokens, "guess": "tide_guessed_by_somebody"}
        daemon.tokens["guess"] = secrets["guess"]
        for who in secrets:
            daemon.http("GET", "/v1/runs", who)
            daemon.http("PATCH", "/v1/runs/x/knobs", who, content=secrets["operate"])
        shown = daemon.http("GET", "/metrics", None).text + daemon.http("GET", "/v1/openapi.json", "read").text
        _, _, printed = process.end(signal.SIGTERM)
    assert "refused GET '/v1/runs' from 127.0.0.1: wrong-token" in printed
    for secret in secrets.values():
        assert secret not in printed + shown
        assert digest_of(secret) not in printed + shown


def test_https(tmp_path: Path) -> None:
    """The announced address is the advertised name, which is the one that the certificate is for."""
    certificate, key = certificate_for(tmp_path, "DNS:localhost")
    options = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--advertise-address", "localhost")
    with Process(tmp_path / "state", ("--port", "0", *options)) as process:
        (tmp_path / "state").mkdir()
        daemon = process.start(ca=certificate)
        assert daemon.url.startswith("https://localhost:")
        with DaemonClient(daemon.url, daemon.tokens["read"], ca=certificate) as client:
            assert client.runs() == []
        with DaemonClient(daemon.url, daemon.tokens["read"]) as client, pytest.raises(DaemonUnreachable, match="TLS"):
            client.runs()


@pytest.mark.parametrize(
    ("names", "advertised", "announced"),
    [
        ("IP:127.0.0.1", None, "127.0.0.1"),
        ("DNS:localhost", None, "localhost"),
        ("DNS:tide.example", "tide.example:8790", "tide.example"),
        ("DNS:*.tide.example", "node.tide.example", "node.tide.example"),
        ("DNS:tide.example", None, "mismatch.* give a name that it is valid for with --advertise-address"),
        ("IP:127.0.0.1", "tide.example", "tide.example: .*mismatch.* get a certificate for that name"),
    ],
)
def test_what_is_announced_can_be_verified(tmp_path: Path, names: str, advertised: str | None, announced: str) -> None:
    certificate, key = certificate_for(tmp_path, names)
    settings = Settings(tls_certificate=certificate, tls_key=key, advertise_address=advertised)
    if "mismatch" not in announced:
        assert settings.announced_host("127.0.0.1") == announced
        return
    with pytest.raises(DaemonError, match=announced):
        settings.announced_host("127.0.0.1")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tls_certificate": "/nowhere"}, "The certificate /nowhere cannot be used: No such file"),
        ({"tls_key": "/nowhere"}, "--tls-key was given without --tls-certificate"),
        ({"tls_certificate": __file__}, "cannot be used: "),
    ],
)
def test_a_certificate_that_cannot_be_used(files: dict[str, str], said: str) -> None:
    with pytest.raises(DaemonError, match=said):
        Settings(**files).announced_host("127.0.0.1")


@pytest.mark.parametrize("header", ["", "Bearer", "Basic abc", "tide_x", "Bearer \u00e9\u00e9".encode()])
def test_odd_authorization(daemon: Daemon, header: str | bytes) -> None:
    assert daemon.http("GET", "/v1/runs", None, headers={"Authorization": header}).status_code == 401


def test_token_files_are_private_and_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with threaded(state) as daemon:
        first = dict(daemon.tokens)
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert {path.stem for path in state.glob("*.token")} == set(SCOPES) == {"read", "operate", "agent", "alert"}
        assert len({first[scope] for scope in SCOPES}) == 4
        stored = b"".join(path.read_bytes() for path in state.glob("tidegate.db*"))
        for scope in SCOPES:
            assert stat.S_IMODE((state / f"{scope}.token").stat().st_mode) == 0o600
            assert first[scope].encode() not in stored
        daemon.app.state.plane.store.tokens.revoke(digest_of(first["read"]))
    (state / "agent.token").unlink()
    os.chmod(state / "operate.token", 0o644)
    with threaded(state) as daemon:
        assert daemon.tokens["operate"] == first["operate"]
        assert stat.S_IMODE((state / "operate.token").stat().st_mode) == 0o600
        assert daemon.tokens["agent"] != first["agent"]
        assert daemon.tokens["read"] != first["read"], "it was withdrawn"
        assert daemon.http("GET", "/v1/runs", "agent").status_code == 200


def test_tokens_that_are_mounted_are_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, state = tmp_path / "secrets", tmp_path / "state"
    mounted.mkdir()

    def daemon() -> Store:
        store: Store = create_app(Settings(state_dir=state, token_dir=mounted)).state.plane.store
        return store

    with pytest.raises(DaemonError, match=r"\.token cannot be read"):
        daemon()
    for scope in SCOPES:
        (mounted / f"{scope}.token").write_text(f"given-by-somebody-{scope}\n" if scope != "agent" else "\n")
    with pytest.raises(DaemonError, match=r"agent\.token is empty"):
        daemon()
    (mounted / "agent.token").write_text("given-by-somebody-agent")
    os.chmod(mounted / "agent.token", 0o444)
    store = daemon()
    assert Tokens(store).check("given-by-somebody-read") == Caller("read", "read")
    store.tokens.revoke(digest_of("given-by-somebody-alert"))
    store.close()
    with pytest.raises(DaemonError, match=r"alert\.token is revoked: write another"):
        daemon()
    (mounted / "alert.token").write_text("given-by-somebody-read")
    with pytest.raises(DaemonError, match=r"alert\.token is of scope read: write another"):
        daemon()
    assert stat.S_IMODE((mounted / "agent.token").stat().st_mode) == 0o444
    assert not list(state.glob("*.token"))
    monkeypatch.setenv("TIDEGATE_TOKEN_DIR", str(mounted))
    for name in ("TIDEGATE_AGENT_TOKEN", "TIDEGATE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert find_token("agent") == "given-by-somebody-agent"


def test_what_reads_finds_a_token_that_can_only_read(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for scope in ("READ_", ""):
        monkeypatch.delenv(f"TIDEGATE_{scope}TOKEN", raising=False)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(daemon.state))
    with DaemonClient(daemon.url, find_token("read")) as reader:
        reader.runs()
        with pytest.raises(NotAuthorized, match=r"scope read; PATCH .* needs operate"):
            reader.preview_knobs("nothing", {"stride": 2}, 0)


def test_an_operate_token_alone_reads_too(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_TOKEN", "AGENT_TOKEN", "TOKEN", "TOKEN_DIR"):
        monkeypatch.delenv(f"TIDEGATE_{name}", raising=False)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_OPERATE_TOKEN", daemon.tokens["operate"])
    with DaemonClient(daemon.url, find_token("read")) as client:
        client.runs()
    assert find_token("agent") is None
    monkeypatch.setenv("TIDEGATE_TOKEN", "for all")
    assert find_token("read") == "for all"


def test_a_state_directory_from_before_gets_its_read_token(tmp_path: Path) -> None:
    with threaded(tmp_path) as daemon:
        first = dict(daemon.tokens)
    (tmp_path / "read.token").unlink()
    with threaded(tmp_path) as daemon:
        assert (daemon.tokens["operate"], daemon.tokens["agent"]) == (first["operate"], first["agent"])
        assert daemon.tokens["read"] != first["read"]
        assert daemon.http("GET", "/v1/runs", "read").status_code == 200


def test_a_token_outlives_a_database_that_is_begun_anew(tmp_path: Path) -> None:
    """Which somebody has to say: a database that is gone is not replaced in silence."""
    with threaded(tmp_path) as daemon:
        token = daemon.tokens["operate"]
    for path in tmp_path.glob("tidegate.db*"):
        path.unlink()
    with pytest.raises(DaemonError, match=r"tidegate\.db is missing, but earlier it existed: restore a backup"):
        create_app(Settings(state_dir=tmp_path))
    (tmp_path / "database.made").unlink()
    with threaded(tmp_path) as daemon:
        assert daemon.tokens["operate"] == token
        assert daemon.http("GET", "/v1/runs").status_code == 200


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"x", "has 1 characters, but must have from 16 to 1024"),
        (b"x" * 1025, "has 1025 characters, but must have from 16 to 1024"),
        (b"a long token with blanks in it", "has characters that no client can send"),
        ("tök-en-of-many-letters".encode(), "has characters that no client can send"),
        (b"\xff" * 32, "is not a text file"),
    ],
)
def test_a_mounted_token_that_is_of_no_use_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    mounted = tmp_path / "secrets"
    mounted.mkdir()
    for scope in SCOPES:
        (mounted / f"{scope}.token").write_bytes(content)
    with pytest.raises(DaemonError, match=said):
        create_app(Settings(state_dir=tmp_path / "state", token_dir=mounted))
