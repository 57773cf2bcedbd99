"""Makes the toy rules known in this process: a file of the core and a folder of the kernels for each."""

from __future__ import annotations

from pathlib import Path

from tidegate import kernels, rules

TOY = Path(__file__).parent / "toy"


def make_known() -> None:
    for package in (rules, kernels):
        folder = str(TOY / package.__name__.rpartition(".")[2])
        if folder not in package.__path__:
            package.__path__.append(folder)
