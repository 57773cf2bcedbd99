"""Host header, size of bodies, and the form of errors."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from tests.daemon.live import Agent, Daemon, hello, new_run
from tidegate.client.daemon_client import MAX_BODY_BYTES
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.server.main import _listen


def test_the_body_of_an_answer_waits_for_no_acknowledgement_of_its_head() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8790", "[::1]:8790", "LOCALHOST", socket.gethostname()])
def test_own_names(daemon: Daemon, host: str) -> None:
    assert daemon.http("GET", "/healthz", None, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8790", ""])
@pytest.mark.parametrize("path", ["/sd", "/v1/runs", "/v1/openapi.json", "/healthz/"])
def test_other_names(daemon: Daemon, host: str, path: str) -> None:
    answer = daemon.http("GET", path, headers={"Host": host})
    assert (answer.status_code, answer.json()["type"]) == (400, "wrong-host")


def ask(daemon: Daemon, *lines: str, body: bytes = b"") -> tuple[int, dict[str, Any], HTTPResponse]:
    """What is answered to a request of these lines, with a token, on a connection of its own."""
    address = urlsplit(daemon.url)
    head = "\r\n".join((*lines, f"Authorization: Bearer {daemon.tokens['read']}", "", "")).encode()
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head + body)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, json.loads(answer.read()), answer


@pytest.mark.parametrize(
    "lines",
    [
        ("GET {path} HTTP/1.1", "Host: 127.0.0.1", "Host: evil.example"),
        ("GET {path} HTTP/1.1", "Host: evil.example", "Host: 127.0.0.1"),
        ("GET {path} HTTP/1.1", "Host: 127.0.0.1", "Host: 127.0.0.1"),
        ("GET http://evil.example{path} HTTP/1.1", "Host: 127.0.0.1"),
        ("GET http://127.0.0.1@evil.example{path} HTTP/1.1", "Host: 127.0.0.1"),
        ("GET HTTPS://evil.example:8790{path} HTTP/1.1", "Host: 127.0.0.1"),
        ("GET http://127.0.0.1{path} HTTP/1.1", "Host: 127.0.0.1", "Host: evil.example"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/runs", "/healthz"])
def test_a_request_has_one_host_and_it_is_the_daemon(daemon: Daemon, lines: tuple[str, ...], path: str) -> None:
    status, problem, _ = ask(daemon, *[line.format(path=path) for line in lines])
    assert (status, problem["type"]) == (400, "wrong-host")


@pytest.mark.parametrize("target", ["http://127.0.0.1:8790/v1/runs", "HTTP://LOCALHOST/v1/runs?x=http://evil.example"])
def test_a_target_may_be_a_whole_address(daemon: Daemon, target: str) -> None:
    assert ask(daemon, f"GET {target} HTTP/1.1", "Host: localhost")[0] == 200


@pytest.mark.parametrize("host", ["", "127.0.0.1:18801@evil.example", ".", "-", "[::1", "a b", "evil.example/x"])
def test_what_can_be_no_name_is_not_offered_as_one(daemon: Daemon, host: str) -> None:
    status, problem, _ = ask(daemon, "GET /v1/runs HTTP/1.1", f"Host: {host}")
    assert (status, problem["type"]) == (400, "wrong-host")
    assert "--allowed-host" not in problem["detail"]
    assert f"{host!r} is no name" in problem["detail"]


@pytest.mark.parametrize("host", ["head", "a_b.example", "10.0.0.1:8790", "[fd00::1]:80", "EVIL.example."])
def test_another_name_is_offered(daemon: Daemon, host: str) -> None:
    _, problem, _ = ask(daemon, "GET /v1/runs HTTP/1.1", f"Host: {host}")
    name = host.removesuffix(":80").removesuffix(":8790").strip("[]").lower()
    assert f"--allowed-host {name}." in problem["detail"]


JSON = "Content-Type: application/json"
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_an_offer_of_another_protocol_is_ignored(daemon: Daemon, offer: tuple[str, ...]) -> None:
    """RFC 9110, 7.8: also with the next requests behind it."""
    assert ask(daemon, "GET /v1/runs HTTP/1.1", "Host: localhost", *offer)[0] == 200
    address = urlsplit(daemon.url)
    request = "\r\n".join(("GET /healthz HTTP/1.1", "Host: localhost", *offer, "", "")).encode()
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(request * 3 + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert said.count(b"HTTP/1.1 200 ") == 4


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("body", [("Content-Length: 33", b""), ("Transfer-Encoding: chunked", b"21\r\n")])
def test_a_body_behind_an_offer_is_no_request(daemon: Daemon, offer: tuple[str, ...], body: tuple[str, bytes]) -> None:
    inner = b"GET /v1/runs HTTP/1.1\r\nHost: x\r\n\r\n"
    lines = ("POST /v1/agents HTTP/1.1", "Host: localhost", *offer, body[0])
    status, problem, answer = ask(daemon, *lines, body=body[1] + inner)
    assert (status, problem["type"]) == (400, "no-upgrade")
    assert answer.getheader("connection") == "close"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"ZZ\r\n", 400, "no-http"),
        (b"-1\r\n", 400, "no-http"),
        (b"1\r\nabc\r\n", 400, "no-http"),
        (b"1;" + b"a" * 70_000, 431, "headers-too-large"),
    ],
)
def test_a_body_that_is_not_chunked_as_it_says_gets_an_answer(
    daemon: Daemon, body: bytes, status: int, kind: str
) -> None:
    lines = ("POST /v1/agents HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked")
    head = "\r\n".join((*lines, f"Authorization: Bearer {daemon.tokens['agent']}", "", "")).encode()
    address = urlsplit(daemon.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head + body)
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["type"]) == (status, kind)
        assert connection.recv(1) == b"", "nothing else is said"


def test_half_a_body_is_not_acted_upon(daemon: Daemon) -> None:
    """What came of it is a whole message; the rest is no HTTP."""
    told = hello(new_run())
    lines = ("POST /v1/agents HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", JSON)
    head = "\r\n".join((*lines, f"Authorization: Bearer {daemon.tokens['agent']}", "", "")).encode()
    body, address = told.model_dump_json().encode(), urlsplit(daemon.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head + b"%x\r\n%s\r\nZZ\r\n" % (len(body), body))
        assert b"".join(iter(lambda: connection.recv(65_536), b"")).startswith(b"HTTP/1.1 400 ")
    Agent(daemon, new_run())  # its hello is behind the other
    assert told.run not in [run.run for run in daemon.client().runs()]


def test_a_request_that_breaks_off_is_not_acted_upon(daemon: Daemon) -> None:
    told = hello(new_run())
    body, address = told.model_dump_json().encode(), urlsplit(daemon.url)
    lines = ("POST /v1/agents HTTP/1.1", "Host: localhost", f"Content-Length: {len(body) + 1}", JSON)
    head = "\r\n".join((*lines, f"Authorization: Bearer {daemon.tokens['agent']}", "", "")).encode()
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(head + body)
        for _ in range(3):  # the daemon has read it when it answers these
            assert daemon.client().runs() is not None
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    Agent(daemon, new_run())  # its hello is behind the other
    assert told.run not in [run.run for run in daemon.client().runs()]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_scrapes_go_by_address(daemon: Daemon, path: str) -> None:
    assert daemon.http("GET", path, None, headers={"Host": "10.0.0.1:8790"}).status_code == 200


def test_a_path_cannot_forge_a_line_of_the_log(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    assert daemon.http("GET", "/v1/a%0Aforged", "alert").status_code == 403
    assert r"'/v1/a\nforged'" in caplog.text


@pytest.mark.parametrize(
    ("address", "name"), [("head:8790", "head"), ("head", "head"), ("[fd00::1]:80", "fd00::1"), ("fd00::1", "fd00::1")]
)
def test_advertised_name_is_allowed(address: str, name: str) -> None:
    assert name in Settings(advertise_address=address).hosts


def test_large_bodies(daemon: Daemon) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    assert daemon.http("POST", "/v1/agents", "agent", content=body).status_code == 413
    in_parts = iter([body[:700_000], body[700_000:]])
    answer = daemon.http("POST", "/v1/agents", "agent", content=in_parts)
    assert (answer.status_code, answer.json()["type"]) == (413, "too-large")
    assert daemon.http("POST", "/v1/agents", None, content=body).status_code == 401


def test_a_body_of_the_largest_size_is_read(daemon: Daemon) -> None:
    answer = daemon.http("POST", "/v1/agents", "agent", content=b"x" * MAX_BODY_BYTES)
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid-message")


SUBGROUPS = {"numel": 1, "count": 1, "weight_bytes": 2, "grad_bytes": 2, "state_bytes": 12}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"run": "a/b"}, "body.run"),
        ({"rank": -1}, "body.rank"),
        *[({"agent": name}, "body.agent") for name in ("", ".", "..", "a/b", "a?b", "a b", "-", "é", "a" * 65)],
        ({"device_kind": "abacus"}, "body.device_kind"),
        ({"surprise": 1}, "body.surprise"),
        ({"subgroups": [{**SUBGROUPS, "count": 100_001}]}, "body.subgroups.0.count"),
        ({"subgroups": [{**SUBGROUPS, "count": 60_000}] * 2}, "body.subgroups"),
    ],
)
def test_invalid_messages_name_the_field(daemon: Daemon, change: dict[str, Any], named: str) -> None:
    body = {**hello(new_run()).model_dump(mode="json"), **change}
    answer = daemon.http("POST", "/v1/agents", "agent", json=body)
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["type"]) == (422, 422, "invalid-message")
    assert [error["at"] for error in problem["errors"]] == [named]


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_knobs_are_finite(daemon: Daemon, number: str) -> None:
    agent = Agent(daemon, new_run())
    body = f'{{"timestamp": 1.0, "step": 1, "phase": "x", "generation": 0, "effective": {{"stride": {number}}}}}'
    answer = daemon.http("POST", f"/v1/agents/{agent.id}/reports", "agent", content=body)
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid-message")
    assert daemon.client().runs()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nowhere", 404), ("POST", "/v1/runs", 405), ("GET", "/v1/runs/none", 404), ("GET", "/v1/runs/", 404)],
)
def test_errors_are_problems(daemon: Daemon, method: str, path: str, status: int) -> None:
    answer = daemon.http(method, path)
    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "status", "detail"} <= answer.json().keys()


def test_another_protocol_is_refused(daemon: Daemon) -> None:
    body = hello(new_run(), protocol=99).model_dump(mode="json")
    answer = daemon.http("POST", "/v1/agents", "agent", json=body)
    assert (answer.status_code, answer.json()["type"]) == (400, "wrong-protocol")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"allowed_hosts": ("",)}, "--allowed-host '' is neither a host name"),
        ({"allowed_hosts": ("a b",)}, "--allowed-host 'a b' is neither a host name"),
        ({"advertise_address": "node/x"}, "--advertise-address 'node/x' is neither a host"),
        ({"advertise_address": "node\n"}, "--advertise-address 'node.*' is neither a host"),
        ({"advertise_address": ""}, "--advertise-address '' is neither a host"),
        ({"bind": ""}, "--bind '' is not an address.*0.0.0.0 for all"),
    ],
)
def test_settings_that_cannot_be_meant(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings(**given)


def test_settings_that_can_be_meant() -> None:
    Settings(allowed_hosts=("*", "*.example.com", "node_1", "::1"), advertise_address="[::1]:8790")
    for address in ("node-1.example", "node:8790", "::1", "10.0.0.1"):
        Settings(advertise_address=address)
