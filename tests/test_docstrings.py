"""The docstrings of the public interface: sentences, units, shapes and dtypes, errors, and the papers.

Each rule is one function, which returns what it finds wrong with a docstring. All rules hold for all public names.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import tidegate
from docs.docstrings import PARAMETERS
from tests.services import ROOT
from tests.test_public_interface import CLASSES, ERRORS, FUNCTIONS, members
from tidegate.errors import TidegateError

MADE_BY = {
    "Attachment": tidegate.attach,
    "DdpOverlap": tidegate.overlap_ddp,
    "ForwardOverlap": tidegate.overlap_forward,
}
"""The function that makes the objects of a class: it documents the arguments of the constructor."""
UNITS = re.compile(
    r"(?i)bytes|seconds|share|count|number|port|norm|weights|threads|subgroups|parameters|steps|updates|generation"
    r"|checksum|as in\s+`"
)
"""Words of which a number has one, in its name or in what is said of it."""
SHAPE = re.compile(r"shape|scalar")
DTYPE = re.compile(r"fp32|dtype|bit")
PLACE = r"(?:Algorithm|Eq\.|Figure|Table|section)\s\d"
PAPER = re.compile(rf"({PLACE} of )?(?:Deep\s+Optimizer\s+States|MLP-Offload)(,\s+{PLACE})?")
OF_PAPERS = {
    "Offload": ("stride", "static_ratio", "policy", "tier_split", "order", "host_slots"),
    "PathSettings": ("lock_slots",),
    "ObjectSettings": ("lock_slots",),
    "overlap_forward": ("overlap_forward",),
}
"""Public names, and their parameters, that do what one of the two papers describes."""


class Documented(NamedTuple):
    """A public name with a docstring. `owner`: its class. `function`: what runs when it is called or read."""

    name: str
    text: str
    owner: type | None
    function: Any
    is_error: bool = False


def public() -> Iterator[Documented]:
    for name in FUNCTIONS:
        function = getattr(tidegate, name)
        yield Documented(name, inspect.getdoc(function) or "", None, function)
    for name in CLASSES:
        kind = getattr(tidegate, name)
        own = kind.__post_init__ if dataclasses.is_dataclass(kind) and hasattr(kind, "__post_init__") else kind.__init__
        texts = [kind.__doc__ or "", inspect.getdoc(MADE_BY.get(name)) or ""]
        if "__init__" in vars(kind):
            texts.append(kind.__init__.__doc__ or "")
        yield Documented(name, "\n\n".join(map(inspect.cleandoc, texts)), kind, own, issubclass(kind, TidegateError))
        for member, value in members(kind):
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            function = plain.fget if isinstance(plain, property) else plain
            yield Documented(f"{name}.{member}", inspect.getdoc(function) or "", kind, inspect.unwrap(function))


ALL = [pytest.param(one, id=one.name) for one in public()]


def parameters(one: Documented) -> list[inspect.Parameter]:
    """All but `self`, `cls`, and the text of an error."""
    if one.is_error and not inspect.isfunction(one.function):
        return []
    found = inspect.signature(one.function if "." in one.name or one.owner is None else one.owner).parameters.values()
    return [p for p in found if p.name not in ("self", "cls") and not (one.is_error and p.name == "message")]


def said_of(parameter: str, text: str) -> str:
    """What the docstring says of a parameter: its line `name: description` with those that continue it, or all."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = PARAMETERS.match(line)
        if found and parameter in found[1].replace("*", "").split(", "):
            rest = [*lines[number + 1 :], ""]
            end = next(i for i, after in enumerate(rest) if not after.startswith("    "))
            return "\n".join([line[found.end() :], *rest[:end]])
    return text


# ---- the rules


@pytest.mark.parametrize("one", ALL)
def test_the_first_line_is_a_sentence(one: Documented) -> None:
    first = re.match(r"[A-Z`][^.]*?(?:[.\w]+\w[^.]*?)*[.:](?=\s|$)", one.text)
    assert first, f"{one.name} has no sentence at the beginning"
    assert len(first[0].split()) >= 3, f"{one.name}: {first[0]!r} says nothing"


@pytest.mark.parametrize("one", ALL)
def test_all_parameters_are_named(one: Documented) -> None:
    of_torch = [
        inspect.getdoc(vars(base)[one.name.partition(".")[2]]) or ""
        for base in (one.owner.__mro__ if one.owner is not None else ())
        if base.__module__ == "torch.optim.optimizer" and one.name.partition(".")[2] in vars(base)
    ]
    inherited = [base.__doc__ or "" for base in one.owner.__mro__ if base in ERRORS.values()] if one.is_error else []  # type: ignore[union-attr]
    words = set(re.findall(r"\w+", " ".join([one.text, *of_torch, *inherited])))
    assert {parameter.name for parameter in parameters(one)} - words == set()


@pytest.mark.parametrize("one", ALL)
def test_numbers_have_a_unit(one: Documented) -> None:
    """In the name or in the docstring."""
    numeric = re.compile(r"\b(?:int|float|Stride)\b")
    for parameter in parameters(one):
        numbers = numeric.search(str(parameter.annotation).partition("Callable")[0])
        if numbers and parameter.name not in ("errno", "status"):
            said = said_of(parameter.name, one.text)
            assert UNITS.search(parameter.name) or UNITS.search(said), f"{one.name}: {parameter.name} has no unit"
    if "." in one.name and numeric.search(str(inspect.signature(one.function).return_annotation)):
        assert UNITS.search(one.text) or "loss" in one.text, f"{one.name} returns a number without a unit"


@pytest.mark.parametrize("one", ALL)
def test_tensors_have_shape_and_dtype(one: Documented) -> None:
    texts = {p.name: said_of(p.name, one.text) for p in parameters(one)
             if "torch.Tensor" in str(p.annotation) or p.name in ("params", "param_group")}  # fmt: skip
    if re.search(r"\btensors?\b", one.text):
        texts[one.name] = one.text
    for name, said in texts.items():
        assert SHAPE.search(said), f"{one.name}: of what shape is {name}?"
        assert DTYPE.search(said), f"{one.name}: of what dtype is {name}?"


@pytest.mark.parametrize("one", ALL)
def test_errors_are_named_with_a_verb(one: Documented) -> None:
    """Those that the function raises itself, or that a private function of its module does that it calls."""
    named = set(re.findall(r"\b[A-Z]\w+", one.text))
    for kind in raised(one.function, one.owner, set()):
        bases = {base.__name__ for base in kind.__mro__} - {"object", "BaseException", "Exception", "TidegateError"}
        assert named & bases, f"{one.name} raises {kind.__name__}, and does not say so"
    beginnings = set(re.findall(r"(?:^|\n\n|[.:]\s+)(\w+)", one.text))
    assert not beginnings & set(ERRORS), f"{one.name} has a sentence without a verb: write 'Raises …'"


def raised(function: Any, owner: type | None, seen: set[Any]) -> Iterator[type[BaseException]]:
    """Exceptions that a function raises by name, itself or in private functions of its module."""
    function = inspect.unwrap(function)
    if function in seen or not getattr(function, "__module__", "").startswith("tidegate."):
        return
    seen.add(function)
    names = function.__globals__ | vars(owner or type(None))
    try:
        source = inspect.getsource(function)
    except OSError:  # made by dataclass
        return
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(node, ast.Call):
            continue
        named = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        called = names.get(named)
        if inspect.isclass(called) and issubclass(called, BaseException):
            yield called
        elif named.startswith("_") and inspect.isfunction(called) and called.__module__ == function.__module__:
            yield from raised(called, owner, seen)


def test_what_is_of_the_papers_says_where() -> None:
    texts = {one.name: one.text for one in public()}
    for name, parts in OF_PAPERS.items():
        for part in parts:
            cited = PAPER.search(said_of(part, texts[name]))
            assert cited, f"{name}: {part} names no paper"
            assert cited[1] or cited[2], f"{name}: {part} does not say where in {cited[0]}"


def test_whoever_names_a_paper_says_where_in_it() -> None:
    """In docstrings and messages of the product. A module may name the papers of which it has the formulas."""
    for folder in ("tidegate", "agent", "daemon", "dashboard", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            heading = ast.get_docstring(tree, clean=False)
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != heading:
                    for cited in PAPER.finditer(node.value):
                        assert cited[1] or cited[2], f"{file.relative_to(ROOT)}:{node.lineno}: where in {cited[0]}?"
