"""What bench/gpu.sh needs beside torch, with pyproject.toml's versions. Imports nothing but Python's own modules.

`python -m bench.gpu.needs` prints the requirements, one a line, as pip reads them.
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
"""Where the name of the module is not that of the package."""
TESTS = ("pytest", "pytest-timeout", "hypothesis")
BUILD = ("cmake", "ninja")
"""Beside what pyproject.toml says that building needs."""
SIDES = ("deepspeed", "torchao")
"""Compared with: where one is missing, its rows say so."""

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
        """What is wrong with what is installed; empty when nothing is."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.requirement}: {ABSENT}"
        try:
            version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return ""
        return "" if satisfies(version, self.requirement) else f"{self.requirement}: {version} is installed"


def package(text: str) -> str:
    """The normal form of the name that a requirement or a wheel's file name begins with."""
    name = re.split(r"-(?=\d)|[^A-Za-z0-9._-]", text, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def needs() -> list[Need]:
    """Torch comes first; all others are in the wheelhouse."""
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
    """For the comparisons that pyproject.toml makes: >=, < and ==."""
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
