"""The documentation against the code: the drawings of rooms, the files that pages name, and all links."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from docs import draw_architecture
from tests.services import ROOT

PLACES = ("*.md", "bench/**/*.md", "docs/**/*.md", "examples/**/*.md", "tests/**/*.md")
PAGES = sorted(str(path.relative_to(ROOT)) for place in PLACES for path in ROOT.glob(place))
FILE = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.(?:py|cpp|h))?)`")
OTHERS = (
    *("checkpoint/", "runtime/", "test/", "v1/"),
    *("dcgan/", "distributed/", "example/", "projects/", "scripts/", "time_sequence_prediction/"),
)
"""Folders in other people's repositories, which `docs/conformance.md` and `docs/frameworks.md` name."""
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)`:\s+`([A-Za-z_][\w.]*)`")
"""A file and what it defines, as the walks have them."""


def test_the_drawings_show_the_imports() -> None:
    page = draw_architecture.PAGE.read_text()
    assert draw_architecture.redrawn(page) == page, "run python -m docs.draw_architecture"


def test_what_a_longer_way_says_is_not_drawn() -> None:
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}
    assert draw_architecture.shortest(edges) == {("a", "b"), ("b", "c"), ("a", "d")}


def test_every_room_has_its_line() -> None:
    page = draw_architecture.PAGE.read_text()
    folders = {path.parent for path in ROOT.glob("tidegate/**/__init__.py")} - {ROOT / "tidegate"}
    rooms = {str(path.relative_to(ROOT)).removeprefix("tidegate/") for path in linked(folders)}
    named = {name.removeprefix("tidegate/") for name in re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)}
    assert rooms - named == set()


def linked(folders: set[Path]) -> set[Path]:
    """With those in the parts, which `glob` does not enter: they are symbolic links."""
    parts = {ROOT / "tidegate" / part for part in draw_architecture.PARTS}
    return folders | parts | {path.parent for part in parts for path in part.resolve().glob("**/__init__.py")}


def test_the_layers_are_those_of_the_contracts() -> None:
    page = draw_architecture.PAGE.read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        if contract["type"] == "layers":
            block = "\n".join(contract["layers"])
            assert f"```text\n{block}\n```" in page, f"the page does not have the layers of {contract['name']!r}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_there(page: str) -> None:
    """Tests may be named without their folder; folders that are not at the top here are somebody else's."""
    names = [name for name in FILE.findall((ROOT / page).read_text()) if not name.startswith(OTHERS)]
    ours = [name for name in names if not name.endswith("/") or (ROOT / name.partition("/")[0]).is_dir()]
    assert [name for name in ours if not (ROOT / name).exists() and not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_names_are_in_their_files(page: str) -> None:
    for file, name in NAMED.findall((ROOT / page).read_text()):
        found: object = importlib.import_module(
            ".".join(("tidegate/" + file.removeprefix("tidegate/"))[:-3].split("/"))
        )
        for part in name.split("."):
            assert hasattr(found, part), f"{page}: {file} has no {name}"
            found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page).parent / name if name else ROOT / page
        assert there.exists(), f"{page} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page} links to {target}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
