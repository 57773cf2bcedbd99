"""OpenAPI document of the daemon's API: FastAPI's own document with tokens, problems, knob bounds and examples added.

`python -m tidegate.daemon.openapi` prints the document; docs/openapi.json is the committed copy.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tidegate.daemon.problems import TITLES
from tidegate.daemon.routes.examples import EXAMPLES
from tidegate.daemon.security.scopes import RouteRequirement
from tidegate.knobs.knobs import SPECS, KnobKind, KnobSpec
from tidegate.wire.standards import Problem

ALWAYS: Final = (400, 413, 422, 500)
"""Status codes of the error responses (problems) that every route can give."""
WITH_TOKEN: Final = (401, 403, 429)
"""Status codes of the further error responses (problems) that every route that needs a token can give."""
_DROPPED: Final = ("HTTPValidationError", "ValidationError")
_DECIMAL: Final = r"[0-9]+(\.[0-9]+)?"
Json = dict[str, Any]


def describe(app: FastAPI) -> Json:
    """The OpenAPI document of `app`."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__.split("\n")[0])
    schemas: Json = document["components"]["schemas"]
    for name in _DROPPED:
        schemas.pop(name, None)
    schemas["Problem"] = Problem.model_json_schema()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            _complete(method, path, operation)
    for example in EXAMPLES:
        schemas[type(example).__name__]["examples"] = [example.model_dump(mode="json", exclude_unset=True)]
    schemas["KnobPatch"]["properties"]["changes"] |= {
        "additionalProperties": False,
        "properties": {name: _values(spec) for name, spec in SPECS.items()},
    }
    return document


def _complete(method: str, path: str, operation: Json) -> None:
    """Adds the token scope and the problem responses to an operation."""
    statuses = set(ALWAYS) | {int(status) for status in operation["responses"] if int(status) >= 400}
    if "security" in operation:
        requirement = RouteRequirement(
            frozenset(scope for needed in operation["security"] for scope in needed["token"])
        )
        operation["description"] = f"{operation.get('description', '')} Token: {requirement.needed}.".strip()
        statuses |= set(WITH_TOKEN)
    if "{" in path:
        statuses.add(404)
    for status in sorted(statuses):
        operation["responses"][str(status)] = {
            "description": TITLES[status],
            "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    for parameter in operation.get("parameters", ()):
        if (method, parameter["name"]) == ("patch", "if-match"):
            parameter["required"] = True


def _values(spec: KnobSpec) -> Json:
    """The JSON schema of the values that a knob can have in any run. The bounds for one run are in `GET …/knobs`."""
    words: list[Json] = [{"type": "string", "enum": list(spec.words)}] if spec.words else []
    weight = rf"[a-z0-9_-]{{1,32}}:{_DECIMAL}(e[+-]?[0-9]{{1,2}})?"
    bounds = {"minimum": spec.minimum, "maximum": spec.maximum}
    by_kind: dict[KnobKind, list[Json]] = {
        "number": [{"type": "number", **bounds}],
        "size": [{"type": "integer", **bounds}, {"type": "string", "pattern": rf"^{_DECIMAL} ?([KMGT]i?)?B$"}],
        "weights": [{"type": "string", "pattern": f"^{weight}(,{weight})*$"}],
        "choice": [],
    }
    return {"anyOf": by_kind[spec.kind] + words, "description": spec.help}
