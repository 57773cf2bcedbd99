"""PromQL taken apart: what an expression selects and which labels it speaks of; and asked of a real Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import promql_parser

VARIABLE = re.compile(r"\$\{?(\w+)\}?")
QUERY_VARIABLE = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
BUILT_IN = {"__rate_interval": "20s", "__interval": "1s"}


def filled(text: str, variables: dict[str, str]) -> str:
    """With the values of Grafana's variables in it. KeyError for one that nobody declares."""
    return VARIABLE.sub(lambda found: {**BUILT_IN, **variables}[found.group(1)], text)


@dataclass
class Parts:
    """Of one expression: its selectors, as PromQL, and the labels that it matches on or groups by."""

    selectors: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    """Labels that the expression makes itself."""


def parts(expression: str) -> Parts:
    """Takes a PromQL expression apart. ValueError for what is none."""
    found = Parts()
    for node in _walk(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            _select(node, found)
        elif isinstance(node, promql_parser.AggregateExpr):
            found.labels |= set(node.modifier.labels if node.modifier else ())
            if str(node.op) == "count_values":
                found.made.add(node.param.val)
        elif isinstance(node, promql_parser.Call) and node.func.name == "label_replace":
            found.made.add(node.args[1].val)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier:
            matching = node.modifier.matching
            found.labels |= set(matching.labels if matching else ()) | set(node.modifier.group_labels or ())
    return found


def _select(node: Any, found: Parts) -> None:
    found.names.add(node.name)
    found.selectors.append(node.prettify().strip().partition(" offset ")[0])


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (inner := getattr(node, name, None)) is not None:
            yield from _walk(inner)
    for argument in getattr(node, "args", None) or ():
        yield from _walk(argument)


def legend_labels(legend: str) -> set[str]:
    return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))


def has_data(rows: list[dict[str, Any]]) -> bool:
    """Whether a range query gave a single number."""
    return any(not math.isnan(float(value)) for row in rows for _, value in row["values"])
