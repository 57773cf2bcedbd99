"""The public interface: the names of the package `tidegate` and their signatures.

`tests/public_interface.txt` has every signature, so that a change of the interface is seen as a change of that file.
Where the change is meant: `python -m tests.test_public_interface > tests/public_interface.txt`.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.services import ROOT
from tidegate import errors

TABLE = Path(__file__).with_name("public_interface.txt")
NAMES = sorted(tidegate.__all__)
CLASSES = [name for name in NAMES if inspect.isclass(getattr(tidegate, name))]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(tidegate, name))]
ERRORS = {
    name: found
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, errors.TidegateError)
}


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that Tidegate defines, by name."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "tidegate":
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in sorted(found.items()):
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property) or inspect.isfunction(plain):
            yield name, value


def interface() -> Iterator[str]:
    """The lines of the table."""
    for name in NAMES:
        public = getattr(tidegate, name)
        if not inspect.isclass(public):
            yield f"{name}{inspect.signature(public)}"
            continue
        yield f"class {name}({', '.join(base.__name__ for base in public.__bases__)})"
        if not issubclass(public, errors.TidegateError) or "__init__" in vars(public):
            yield f"    {name}{inspect.signature(public)}"
        for member, value in members(public):
            if isinstance(value, property):
                assert value.fget is not None
                yield f"    {member} -> {inspect.signature(value.fget).return_annotation!r}"
            else:
                kind = f"{type(value).__name__} " if isinstance(value, classmethod | staticmethod) else ""
                yield f"    {kind}{member}{inspect.signature(getattr(public, member))}"


def test_names_and_signatures_are_those_of_the_table() -> None:
    assert list(interface()) == TABLE.read_text().splitlines(), "see the first lines of this file"


def test_every_error_is_a_name_of_the_package() -> None:
    assert set(ERRORS) <= set(tidegate.__all__)
    assert all(getattr(tidegate, name) is found for name, found in ERRORS.items())
    assert len(set(tidegate.__all__)) == len(tidegate.__all__)
    assert set(tidegate.__all__) <= set(dir(tidegate))


def test_the_page_of_errors_is_the_tree() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \| (.*?)\|$", page, re.MULTILINE)
    assert {name: base for name, base, *_ in rows} == {
        name: kind.__bases__[0].__name__ for name, kind in ERRORS.items()
    }
    assert len(rows) == len(ERRORS)
    for name, _, _, _, attributes in rows:
        own = vars(ERRORS[name]).get("__init__")
        made = set(re.findall(r"self\.(\w+) =", inspect.getsource(own))) if own is not None else set()
        assert set(re.findall(r"`(\w+)`", attributes)) == made, name


def test_the_tree_in_the_module_is_complete() -> None:
    assert set(ERRORS) <= set(re.findall(r"\w+", errors.__doc__ or ""))


def test_importing_the_package_and_its_errors_is_cheap() -> None:
    program = (
        "import sys, tidegate; tidegate.PathFull; tidegate.KnobError;"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'pydantic', 'httpx'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_name_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Adam'"):
        tidegate.Adam  # noqa: B018


# ---- handles


@pytest.mark.parametrize(
    ("function", "handle"),
    [
        ("attach", "Attachment"),
        ("overlap_forward", "ForwardOverlap"),
        ("overlap_ddp", "DdpOverlap"),
        ("enable_deepspeed", "DeepSpeedIntegration"),
    ],
)
def test_what_switches_something_on_returns_a_handle(function: str, handle: str) -> None:
    signature = inspect.signature(getattr(tidegate, function))
    assert signature.return_annotation == handle
    assert list(signature.parameters)[:2] in (["optimizer", "model"], [])
    kind = getattr(tidegate, handle)
    assert "Idempotent" in (inspect.getdoc(kind.close) or "")
    assert {"close", "__enter__", "__exit__"} <= set(vars(kind))


if __name__ == "__main__":
    print(*interface(), sep="\n")
