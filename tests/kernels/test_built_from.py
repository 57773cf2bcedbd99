"""A native module that is older than its sources is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tidegate.kernels import _native
from tidegate.kernels.built_from import checksum_of_sources, require_current_build

SOURCES = Path(__file__).parents[2] / "kernels" / "src"


def test_the_build_and_python_compute_the_same_sum() -> None:
    assert checksum_of_sources(SOURCES) == _native.SOURCES


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_changed_sources_are_refused(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "src"
    shutil.copytree(SOURCES, folder)
    require_current_build(folder)
    if change == "edited":
        step = folder / "adamw_step.h"
        step.write_text(step.read_text().replace("beta2", "beta1", 1))
    elif change == "added":
        (folder / "new.h").touch()
    else:
        (folder / "prefetch.h").unlink()
    with pytest.raises(ImportError, match="pip install -e"):
        require_current_build(folder)


def test_a_wheel_without_sources_is_fine(tmp_path: Path) -> None:
    require_current_build(tmp_path / "absent")
