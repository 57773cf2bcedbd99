"""What each route asks of its caller: declared where the route is, told in the API's description, and held."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from tests.daemon.live import Daemon, threaded
from tidegate.client.discovery import SCOPES, Scope
from tidegate.daemon.configuration.settings import Settings
from tidegate.daemon.security import scopes

ANYBODY = {
    "/", "/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/v1/openapi.json",
    "/healthz", "/readyz", "/metrics", "/sd", "/v1/proof",
}  # fmt: skip
"""What needs no token: nothing of a run is in it, but for what Prometheus must be told."""
GOOD_FOR: dict[str, set[Scope]] = {
    "read": {"read", "operate", "agent"}, "operate": {"operate"}, "agent": {"agent"}, "alert": {"alert"},
}  # fmt: skip
FILLED = {"{agent}": "nobody", "{run}": "nothing", "{rank}": "0"}


def declared(app: FastAPI) -> list[tuple[str, str, str]]:
    """Method, path and scope of every route, asked of the application; no scope where all may."""
    found = []
    for route in (
        inner for one in app.routes for inner in getattr(getattr(one, "original_router", None), "routes", [one])
    ):
        assert isinstance(route, APIRoute), f"{route} declares nothing"
        asked = scopes.requirement_of(route)
        found += [(method, route.path, *asked.scopes) for method in route.methods] if asked.scopes else []
        found += [(method, route.path, "") for method in route.methods] if asked.open else []
    assert len(found) >= 30
    return found


def test_every_route_declares_a_scope_or_is_one_of_a_few(daemon: Daemon) -> None:
    assert {path for _, path, scope in declared(daemon.app) if not scope} == ANYBODY
    assert {scope for _, _, scope in declared(daemon.app)} - {""} == set(get_args(Scope))


def test_the_description_says_the_scope_of_every_operation(daemon: Daemon) -> None:
    document = daemon.http("GET", "/v1/openapi.json", None).json()
    described = {
        (method.upper(), path): [scope for needed in operation.get("security", ()) for scope in needed["token"]]
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    wanted = {(method, path): [scope] if scope else [] for method, path, scope in declared(daemon.app)}
    assert described == {key: wanted[key] for key in described}
    assert {path for _, path in wanted.keys() - described.keys()} < ANYBODY


def test_no_other_scope_and_no_stranger_comes_in(daemon: Daemon) -> None:
    for method, path, needed in declared(daemon.app):
        for name, value in FILLED.items():
            path = path.replace(name, value)
        for scope in (None, *SCOPES):
            answer = daemon.http(method, path, scope, params={"wait": 0}, content=b"{")
            expected = None if not needed or scope in GOOD_FOR[needed] else 401 if scope is None else 403
            told = f"{scope} {method} {path}: {answer.status_code} {answer.text[:200]}"
            assert (answer.status_code if answer.status_code in (401, 403) else None) == expected, told


@pytest.mark.parametrize(
    ("dependencies", "said"),
    [
        ([], "must declare"),
        ([scopes.OPEN, scopes.READ], "must declare"),
        ([scopes.READ, scopes.OPERATE], "must declare"),
    ],
)
def test_a_route_that_does_not_say_what_it_asks_is_not_served(dependencies: list[Any], said: str) -> None:
    router = APIRouter()
    router.add_api_route("/v1/secret", lambda: None, dependencies=dependencies)
    with pytest.raises(LookupError, match=f"/v1/secret {said}"):
        scopes.RouteRequirements(router.routes)


@pytest.mark.parametrize("path", ["/v1/agentsx", "//v1/agents", "/v1/agents%2fx", "/V1/agents", "/v1/runs/x/y/z"])
@pytest.mark.parametrize(("method", "needed"), [("GET", "read"), ("HEAD", "read"), ("PATCH", "operate")])
def test_what_is_not_there_is_closed(daemon: Daemon, method: str, path: str, needed: str) -> None:
    """Nobody learns from it what is there; an agent, too, reaches only its own."""
    if path == "/v1/agents%2fx" and method == "PATCH":
        needed = "agent"  # it is the path of an agent, which has no such method
    for scope in (None, *SCOPES):
        answer = daemon.http(method, path, scope)
        wanted = 401 if scope is None else 403 if scope not in GOOD_FOR[needed] else (404, 405)
        assert answer.status_code in (wanted if isinstance(wanted, tuple) else (wanted,)), (scope, answer.status_code)


@pytest.mark.parametrize("path", sorted(ANYBODY))
def test_another_method_of_an_open_path_is_refused_without_a_token_too(daemon: Daemon, path: str) -> None:
    assert daemon.http("POST", path, None).status_code == 405


@pytest.mark.parametrize("pattern", ["evil*", "*evil.example", "a.*.example"])
def test_a_name_that_cannot_be_allowed(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"the name of a host, \*\.example\.com for all below example\.com, or \*"):
        Settings(allowed_hosts=(pattern,))


def test_names_below_a_domain(tmp_path: Path) -> None:
    hosts = {"a.example.com:1": 200, "example.com": 400, "aexample.com": 400, "a_b:80": 200, "a b": 400}
    with threaded(tmp_path, allowed_hosts=("*.example.com", "a_b")) as other:
        assert {host: other.http("GET", "/sd", None, headers={"Host": host}).status_code for host in hosts} == hosts
