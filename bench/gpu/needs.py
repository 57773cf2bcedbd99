"""The packages that bench/gpu.sh needs besides torch, with the versions of pyproject.toml. Needs only Python's standard
library.

`python -m bench.gpu.needs` prints the requirements, one per line, in pip's format.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"nvidia-ml-py": "pynvml", "scikit-build-core": "scikit_build_core"}
"""Names of modules that differ from the name of their package, by package."""
TESTS = ("pytest", "pytest-timeout", "hypothesis")
BUILD = ("cmake", "ninja")
"""Build tools that are needed in addition to the build requirements of pyproject.toml."""
SIDES = ("deepspeed", "torchao")
"""Packages with which Tidegate is compared. If one is missing, its rows in the results say so."""

ABSENT = "not installed"
Kind = Literal["run", "build", "side"]


@dataclass(frozen=True)
class Need:
    requirement: str
    kind: Kind

    @property
    def name(self) -> str:
        return package(self.requirement)

    @property
    def module(self) -> str:
        return MODULES.get(self.name, self.name.replace("-", "_"))

    def problem(self) -> str:
        """Description of the problem if the package is missing or has a wrong version; empty if it is fine."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.requirement}: {ABSENT}"
        try:
            version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return ""
        return "" if satisfies(version, self.requirement) else f"{self.requirement}: {version} is installed"


def package(text: str) -> str:
    """The normalized package name at the beginning of a requirement or of a wheel's file name."""
    name = re.split(r"-(?=\d)|[^A-Za-z0-9._-]", text, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def needs() -> list[Need]:
    """All packages that bench/gpu.sh needs, with torch first. The folder of wheels (`bench.gpu.wheelhouse`) has all of
    them except torch."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = said["project"], said["project"]["optional-dependencies"]
    known = {package(text): text.partition(" #")[0] for texts in extras.values() for text in texts}
    run = [*extras["agent"], *project["dependencies"], known["transformers"], *(known[name] for name in TESTS)]
    build = [*said["build-system"]["requires"], *(known[name] for name in BUILD)]
    return [
        *(Need(text, "run") for text in run),
        *(Need(text, "build") for text in build),
        *(Need(known.get(name, name), "side") for name in SIDES),
    ]


def satisfies(version: str, requirement: str) -> bool:
    """Whether the version meets the requirement. Only the comparisons of pyproject.toml are known: >=, < and ==."""
    have = _numbers(version)
    for sign, bound in re.findall(r"(>=|<|==)\s*([\d.]+)", requirement.partition(";")[0]):
        want = _numbers(bound)
        width = max(len(have), len(want))
        one, other = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
        if not {">=": one >= other, "<": one < other, "==": one == other}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)


if __name__ == "__main__":
    print(*(need.requirement for need in needs()), sep="\n")
