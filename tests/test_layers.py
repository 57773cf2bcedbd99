"""Each test is run by one command of the Makefile, and each file of tests belongs to one part."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import tomllib
from collections import Counter
from itertools import chain, combinations

import pytest
from _pytest.mark.expression import Expression

from tests.parts import LONGEST, PARTS, TESTS, files

ROOT = TESTS.parent
LAYERS = ("test", "test-all", "torture", "soak")
TOPS = ("agent", "bench", "daemon", "dashboard", "grafana", "kernels", "tidegate")
ALL_ROOMS = {"alerts", "conformance", "deployment", "gpu"}
MAX_LINES = 400
LONG = {
    "bench/overhead.py": "one measurement, read from top to bottom",
    "bench/reporting/claims.py": "a table: one entry for each bench",
}
"""Modules of more than `MAX_LINES` lines, and why. Tests are not counted: a file of tests is one subject's cases."""
MARKS = ("slow", "hypothesis", "alone", "gpu", "torture", "soak")
"""All that decide where a test is run. `hypothesis` is put on property tests by Hypothesis itself."""


@functools.cache
def expressions(target: str) -> list[Expression]:
    """The marks by which `make TARGET` chooses tests, one for each time that it calls pytest."""
    done = subprocess.run(["make", "-n", "-C", ROOT, target], capture_output=True, text=True, check=True)
    calls = [shlex.split(call) for call in re.findall(r"/pytest (.*?)(?: \|\||$)", done.stdout, re.MULTILINE)]
    assert calls
    return [Expression.compile(words[words.index("-m") + 1]) for words in calls]


def runs_of(target: str, marks: set[str]) -> int:
    """How often `make TARGET` runs a test with these marks."""
    return sum(expression.evaluate(lambda name, **_: name in marks) for expression in expressions(target))


def sets_of_marks() -> list[set[str]]:
    return [set(chosen) for chosen in chain.from_iterable(combinations(MARKS, n) for n in range(4))]


@pytest.mark.parametrize("marks", sets_of_marks(), ids=lambda marks: "+".join(sorted(marks)) or "none")
def test_nothing_is_in_no_layer(marks: set[str]) -> None:
    runs = {target: runs_of(target, marks) for target in LAYERS}
    assert max(runs.values()) <= 1, "one command runs it twice"
    elsewhere = marks & {"gpu", "torture", "soak"}
    if elsewhere:
        assert runs["test"] == runs["test-all"] == 0
        assert "gpu" in elsewhere or sum(runs.values()) == len(elsewhere)
    elif marks & {"slow", "alone"}:
        assert runs == {"test": 0, "test-all": 1, "torture": 0, "soak": 0}
    else:
        assert runs == {"test": 1, "test-all": int("hypothesis" in marks), "torture": 0, "soak": 0}


def test_every_mark_is_known_here() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert {text.partition(":")[0] for text in declared} == set(MARKS) - {"hypothesis"}


def test_each_file_belongs_to_one_part() -> None:
    of_parts = Counter(path for part in PARTS for path in files(part))
    assert set(of_parts) == set(TESTS.rglob("test_*.py"))
    assert set(of_parts.values()) == {1}


def test_each_pattern_finds_a_file() -> None:
    patterns = [pattern for patterns in PARTS.values() for pattern in patterns]
    assert [pattern for pattern in (*patterns, *LONGEST) if not list(TESTS.glob(pattern))] == []


def test_folders_of_tests_are_rooms_of_the_product() -> None:
    """Apart from ALL_ROOMS, whose tests look at the product as a whole."""
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")} - {".", *ALL_ROOMS}
    modules = [path.relative_to(ROOT) for top in TOPS for path in (ROOT / top).rglob("*.py")]
    rooms = {room.as_posix().removeprefix("tidegate/") for path in modules for room in path.parents}
    assert folders - rooms == set()


def test_no_module_is_long_without_a_reason() -> None:
    modules = [path for top in TOPS for path in (ROOT / top).rglob("*.py")]
    long = {path.relative_to(ROOT).as_posix() for path in modules if path.read_text().count("\n") > MAX_LINES}
    assert long == set(LONG)


def test_make_knows_the_parts() -> None:
    done = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True)
    assert re.search(r"PART being one of\n +(.+)\n", done.stdout)[1].split() == list(PARTS)  # type: ignore[index]


def test_continuous_integration_runs_both_layers_and_the_checks() -> None:
    commands = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands == ["test", "test-all", "check"]
