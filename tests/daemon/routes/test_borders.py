"""Everything that comes from outside has a bound, and nothing that comes is answered with a failure of the daemon."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.daemon.live import Agent, Daemon, hello, new_run, step_report
from tests.examples import examples
from tidegate.daemon.routes.fast_route import FastRoute
from tidegate.wire.agent import AgentReport
from tidegate.wire.timeline import TimelineView

SURROGATE = "\ud800"
ANY_NUMBER = {"loss", "grad_norm"}
"""What training makes may be anything, NaN included."""
AT = "2026-01-01T00:00:00Z"
WEBHOOK: dict[str, Any] = {
    "version": "4",
    "alerts": [
        {"status": "firing", "labels": {"alertname": "x"}, "startsAt": AT, "endsAt": AT, "fingerprint": "0a"},
    ],
}
RATES = {
    "h2d_bytes_per_second": 1e9, "d2h_bytes_per_second": 1e9, "cpu_params_per_second": 1e9,
    "device_params_per_second": 1e9, "norm_params_per_second": 1e9, "overhead_seconds": 0.0, "step_seconds": 0.0,
    "paths": {"nvme": {"read_bytes_per_second": 1e9, "write_bytes_per_second": 1e9}},
    "op_seconds": {"h2d": 0.0}, "keeps": {"h2d": {"d2h": 0.9}},
}  # fmt: skip
SIZES = [{"numel": 1000, "count": 4, "weight_bytes": 2000, "grad_bytes": 2000, "state_bytes": 12_000}]


def models(daemon: Daemon) -> Iterator[tuple[str, Any]]:
    """Every body that a route takes, by its path."""
    for router in (one.original_router for one in daemon.app.routes):
        for route in router.routes:
            assert isinstance(route, APIRoute)
            if isinstance(route, FastRoute):
                yield from ((route.path, model) for model in route._body.values())
            elif route.body_field is not None:
                yield route.path, route.body_field.field_info.annotation


def unbounded(schema: Any, at: str) -> Iterator[str]:
    """Places in a JSON schema that take texts, lists, objects or numbers without an end."""
    match schema:
        case {"type": "string"} if not schema.keys() & {"maxLength", "enum", "const", "format"}:
            if not str(schema.get("pattern", "")).endswith(("}$", "}$)")):
                yield f"{at}: a text of any length"
        case {"type": "array"} if "maxItems" not in schema:
            yield f"{at}: any number of items"
        case {"type": "object", "additionalProperties": other} if other and "maxProperties" not in schema:
            if "enum" not in schema.get("propertyNames", ()):
                yield f"{at}: any number of keys"
        case {"type": "number"} if at.rpartition(".")[2] not in ANY_NUMBER and not _bounded(schema):
            yield f"{at}: any number"
        case {"type": "integer"} if not _bounded(schema):
            yield f"{at}: any whole number"
    if isinstance(schema, dict):
        for name, inner in schema.items():
            yield from unbounded(inner, at if name in ("properties", "$defs", "anyOf", "items") else f"{at}.{name}")
    if isinstance(schema, list):
        for inner in schema:
            yield from unbounded(inner, at)


def _bounded(schema: dict[str, Any]) -> bool:
    return bool(schema.keys() & {"maximum", "exclusiveMaximum"}) and bool(
        schema.keys() & {"minimum", "exclusiveMinimum"}
    )


def test_every_field_of_every_message_is_bounded(daemon: Daemon) -> None:
    found = dict(models(daemon))
    assert len(found) >= 6
    schemas = {path: TypeAdapter(model).json_schema() for path, model in found.items()}
    assert [place for path, schema in schemas.items() for place in unbounded(schema, path)] == []


@pytest.fixture(scope="module")
def agent(daemon: Daemon) -> Agent:
    """A rank whose update can be predicted."""
    made = Agent(daemon, new_run(), subgroups=SIZES, paths=("nvme",))
    made.train(30, 1.0)
    made.say(rates=RATES, effective={"stride": 2.0, "host_cache": 0})
    return made


def bodies(agent: Agent) -> dict[tuple[str, str, str], dict[str, Any]]:
    """A good message for each route that takes one: method, path, scope."""
    at, of = f"/v1/agents/{agent.id}", f"/v1/runs/{agent.message.run}"
    timeline = TimelineView(step=1, source="measured", origin=0.0, phases=(), spans=(), num_spans=0, deps={1: (2,)})
    report = AgentReport(
        timestamp=agent.message.started_at + 1e6, step=10**6, phase="update", generation=0,
        effective={"stride": 2.0, "host_cache": 0}, steps=(step_report(10**6),), timeline=timeline,
    ).model_dump(mode="json")  # fmt: skip
    patch = {"changes": {"stride": 3, "static_ratio": 0.5, "tier_split": "nvme:1", "host_cache": 0}, "reason": "why"}
    return {
        ("POST", "/v1/agents", "agent"): hello("bordered", subgroups=SIZES).model_dump(mode="json"),
        ("POST", f"{at}/reports", "agent"): {**report, "rates": RATES},
        ("POST", f"{at}/votes", "agent"): {"generation": 1, "can": True, "reason": ""},
        ("PATCH", f"{of}/knobs", "operate"): patch,
        ("POST", f"{of}/rollback", "operate"): {"to": 1, "reason": "why"},
        ("POST", "/v1/alerts", "alert"): WEBHOOK,
    }


def sent(daemon: Daemon, method: str, path: str, scope: str, body: Any) -> Any:
    """The answer, which is no failure; nor is any that is asked for afterwards."""
    params = {"dry_run": "true"} if method == "PATCH" else {}
    headers = {"Content-Type": "application/json", "If-Match": "*"}
    answer = daemon.http(method, path, scope, content=json.dumps(body).encode(), headers=headers, params=params)
    assert answer.status_code < 500, (path, json.dumps(body)[:500], answer.text)
    return answer


QUESTIONS = (
    "", "/knobs", "/generations", "/advice", "/audit", "/alerts", "/ranks/0/steps", "/ranks/0/rates",
    "/ranks/0/timelines", "/ranks/0/timeline",
)  # fmt: skip
"""What is asked of a run."""


def all_is_well(daemon: Daemon, run: str, *asked: str) -> None:
    """Every question that people and programs ask is answered, and so is a preview; `asked`: only these of the run."""
    of_all = () if asked else ("/v1/audit", "/v1/alerts?runs=all", "/sd", "/metrics")
    for path in ("/v1/runs", *of_all, *(f"/v1/runs/{run}{question}" for question in asked or QUESTIONS)):
        answer = daemon.http("GET", path)
        assert answer.status_code < 500, (path, answer.text)
        if "json" in answer.headers.get("content-type", ""):
            answer.json()
    path, patch = f"/v1/runs/{run}/knobs?dry_run=true", {"changes": {"stride": 3}}
    preview = daemon.http("PATCH", path, headers={"If-Match": "*"}, json=patch)
    assert preview.status_code == 200, preview.text


ODD_VALUES: list[Any] = [
    -1, 0, -0.0, 1e-300, 5e-324, 1e308, -1e308, 10**18, 2**63, -(2**63), 10**400, float("nan"), float("inf"),
    float("-inf"), "", "\0", SURROGATE, f"a{SURROGATE}b", "x" * 300, "\x1b[31m", "1" * 60, True, None, [], {},
    {SURROGATE: 1}, {"": ""}, [[]], "auto", "nvme:1",
]  # fmt: skip
ODD_KEYS = [SURROGATE, "", "\0", "x" * 70, "stride"]
ODD = st.sampled_from(ODD_VALUES)


def places(message: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in the message that can be another thing: what holds it, and where."""
    for key, inner in message.items() if isinstance(message, dict) else enumerate(message):
        yield message, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_nothing_that_is_sent_makes_the_daemon_fail(daemon: Daemon, agent: Agent, data: st.DataObject) -> None:
    """Odd values and odd keys at any place of any message. What is taken breaks no answer that is given later."""
    (method, path, scope), good = data.draw(st.sampled_from(list(bodies(agent).items())))
    body = json.loads(json.dumps(good))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(list(places(body))))
        if isinstance(holder, dict) and data.draw(st.integers(0, 4)) == 0:
            holder[data.draw(st.sampled_from(ODD_KEYS))] = copy.deepcopy(data.draw(ODD))
        else:
            holder[key] = copy.deepcopy(data.draw(ODD))  # the next odd value may be put into this one
    answer = sent(daemon, method, path, scope, body)
    if answer.status_code < 300:
        all_is_well(daemon, agent.message.run)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"host_cache": 10**400}, "9223372036854775808"),
        ({SURROGATE: 1}, "string"),
        ({"tier_split": SURROGATE}, "string"),
        ({"x" * 5000: 1}, "at most 128 characters"),
        ({"tier_split": "x" * 5000}, "at most 4096 characters"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_with_the_bound(
    daemon: Daemon, agent: Agent, changes: dict[str, Any], told: str
) -> None:
    path = f"/v1/runs/{agent.message.run}/knobs"
    answer = sent(daemon, "PATCH", path, "operate", {"changes": changes})
    assert answer.status_code == 422, answer.text
    assert told in answer.text


@pytest.mark.parametrize("name", sorted(RATES))
def test_a_rate_that_cannot_be_is_refused(daemon: Daemon, agent: Agent, name: str) -> None:
    """And what was known of the run before is still there."""
    good: Any = RATES[name]
    at, report = next((key, body) for key, body in bodies(agent).items() if key[1].endswith("/reports"))
    for number in (-1.0, float("nan"), float("inf"), 1e300):
        wrong: Any = number
        if isinstance(good, dict):
            wrong = {
                of: dict.fromkeys(inner, number) if isinstance(inner, dict) else number for of, inner in good.items()
            }
        answer = sent(daemon, *at, {**report, "rates": {**RATES, name: wrong}})
        assert answer.status_code == 422, answer.text
        assert f"body.rates.{name}" in answer.text
    advice = daemon.http("GET", f"/v1/runs/{agent.message.run}/advice")
    assert advice.status_code == 200, advice.text


TINY = {**{name: 5e-324 for name in RATES if name.endswith("per_second")}, "keeps": {"h2d": {"d2h": 5e-324}}}
STRANGE: dict[str, dict[str, Any]] = {
    "speeds of almost nothing": {"rates": {**RATES, **TINY}},
    "a path of almost no speed": {"rates": {**RATES, "paths": {"nvme": {"read_bytes_per_second": 5e-324}}}},
    "an update of almost no time": {"predicted_update_seconds": 5e-324},
    "an update without end": {"predicted_update_seconds": 1e9, "rates": {**RATES, "overhead_seconds": 1e9}},
    "a stride that is none": {"effective": {"stride": "x", "host_cache": 0}},
    "a stride below 1": {"effective": {"stride": -3.0, "host_cache": 0}},
    "a stride of nothing": {"effective": {"stride": 0, "host_cache": 0}},
    "a cache that is none": {"effective": {"stride": 2.0, "host_cache": "much"}},
    "a cache below 0": {"effective": {"stride": 2.0, "host_cache": -(2**62)}},
    "steps of almost no time": {"phases": dict.fromkeys(("forward", "backward", "update"), 5e-324)},
    "steps without end": {"phases": dict.fromkeys(("forward", "backward", "update"), 1e9)},
}


QUICK = ("speeds of almost nothing", "a stride that is none", "steps without end")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in STRANGE if name not in QUICK)]
)
def test_figures_that_cannot_be_true_together_break_no_answer(daemon: Daemon, name: str) -> None:
    made = Agent(daemon, new_run(), subgroups=[{**SIZES[0], "state_bytes": 2**62}], paths=("nvme",))
    made.train(30, 1.0)
    told = {"rates": RATES, "effective": {"stride": 2.0, "host_cache": 0}, **STRANGE[name]}
    phases, first = told.pop("phases", {"update": 1.0}), made.step + 1
    made.step += 30
    steps = [step_report(n).model_copy(update={"phase_seconds": phases}) for n in range(first, made.step + 1)]
    made.say(steps=tuple(steps), **told)
    all_is_well(daemon, made.message.run, "/advice", "/knobs", "")


MANY_NAMES = tuple(f"{number:02}{'x' * 30}" for number in range(64))


def test_all_knobs_of_a_rank_together_have_a_bound(daemon: Daemon) -> None:
    """The daemon keeps them for each rank and tells all of them at once."""
    many = {f"knob{number}": "x" * 1900 for number in range(4)}
    length = sum(map(len, [*many, *many.values()]))
    said = f"names and values have {length:,} characters in all, at most 6,000 are allowed"
    refused = sent(daemon, "POST", "/v1/agents", "agent", hello(new_run()).model_dump() | {"knobs": many})
    assert (refused.status_code, said in refused.text) == (422, True), refused.text
    made = Agent(daemon, new_run())
    report = {"timestamp": 0.0, "step": 1, "phase": "x", "generation": 0, "effective": many}
    refused = sent(daemon, "POST", f"/v1/agents/{made.id}/reports", "agent", report)
    assert (refused.status_code, said in refused.text) == (422, True), refused.text


def test_the_split_of_64_paths_with_long_names_is_taken(daemon: Daemon) -> None:
    split = ",".join(f"{name}:1000000" for name in MANY_NAMES)
    made = Agent(daemon, new_run(), paths=MANY_NAMES, knobs={"stride": 2.0, "tier_split": split})
    made.say(effective={"stride": 2.0, "static_ratio": 0.0, "tier_split": split, "host_cache": 0, "order": "auto"})
    assert daemon.client().run(made.message.run).ranks[0].effective["tier_split"] == split


@pytest.mark.parametrize("place", ["labels", "annotations"])
@pytest.mark.parametrize("pair", [{SURROGATE: "x"}, {"x": f"a{SURROGATE}"}])
def test_a_label_that_no_text_can_be_is_refused(daemon: Daemon, place: str, pair: dict[str, str]) -> None:
    """The audit log is append-only: what nobody can read again may not get there."""
    alert = {**WEBHOOK["alerts"][0], "fingerprint": "0b", "annotations": {}}
    alert[place] = {**alert[place], **pair}
    answer = sent(daemon, "POST", "/v1/alerts", "alert", {"version": "4", "alerts": [alert]})
    assert answer.status_code == 422, answer.text
    assert [row for row in daemon.client().audit(None) if row.after.get("fingerprint") == "0b"] == []


def test_a_problem_can_be_told_whatever_it_is_about(daemon: Daemon) -> None:
    answer = daemon.http("POST", "/v1/agents", "agent", content=b'{"\\ud800\\udfff\\ud800": 1}')
    assert (answer.status_code, answer.json()["type"]) == (422, "invalid-message")
