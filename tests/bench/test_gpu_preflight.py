"""What bench/gpu.sh says before it begins on machines that lack things, and what becomes of rows that lacked time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from bench.gpu import preflight
from bench.gpu.iteration import run_side
from bench.gpu.needs import needs, package, satisfies
from bench.gpu.rows import Rows, file_of
from bench.gpu.target import Target
from bench.gpu.wheelhouse import chosen
from tests.bench.test_gpu import ROOT
from tidegate import triton_needs
from tidegate.agent.devices import cuda_problem
from tidegate.kernels import _native

# ---- the message


def gpu_sh(python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "bench" / "gpu.sh", *arguments], env=os.environ | {"PYTHON": str(python)} | environment, cwd="/",
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def only(folder: Path, *programs: str) -> str:
    """A PATH with these programs and no others."""
    folder.mkdir()
    for name in programs:
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


def test_a_bare_machine_is_told_all_that_it_lacks_at_once(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    programs = only(tmp_path / "bin", "bash", "dirname", "env", "mkdir", "realpath", "sed")
    done = gpu_sh(tmp_path / "bare" / "bin" / "python", "--out", str(tmp_path / "out"), PATH=programs)
    assert done.returncode == 2, done.stderr
    for word in ("torch>=", "numpy>=", "transformers>=", "pytest>=", "nanobind>=", "ninja>=", "no C++ compiler",
                 "no C compiler", "Triton is not installed", "bench.gpu.wheelhouse"):  # fmt: skip
        assert word in done.stderr
    assert done.stderr.count("missing:") == 1
    assert "==" not in done.stdout, "no stage began"


def test_wheels_count_as_installed_unless_they_are_for_another_python(tmp_path: Path) -> None:
    for need in needs():
        (tmp_path / f"{need.name.replace('-', '_')}-1.0-py3-none-any.whl").touch()
    assert not any("WHEELS" in line for line in preflight.missing(True, tmp_path))
    (tmp_path / "numpy-2.0.0-cp39-cp39-manylinux_2_28_x86_64.whl").touch()
    (line,) = [line for line in preflight.missing(True, tmp_path) if "another Python" in line]
    assert "numpy-2.0.0-cp39" in line
    (line,) = [line for line in preflight.missing(True, tmp_path / "none") if "holds no wheels" in line]
    assert "bench.gpu.wheelhouse" in line


def test_this_environment_lacks_nothing_for_a_dry_run() -> None:
    assert preflight.missing(True, None) == []


def test_a_gpu_run_without_a_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_problem, "cuda_problem", lambda: cuda_problem.CudaProblem("its driver is old", "renew it"))
    lines = preflight.missing(False, None)
    assert any(
        "no GPU can be used: its driver is old; renew it" in line and "--dry needs none" in line for line in lines
    )


# ---- Triton


def test_each_thing_that_triton_lacks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    locked = tmp_path / "locked"
    locked.touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_LIBCUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(locked / "cache"))
    monkeypatch.setattr(triton_needs, "LDCONFIG", tmp_path / "ldconfig")
    monkeypatch.setattr(triton_needs.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(triton_needs.importlib.metadata, "version", none)
    said = triton_needs.missing_for_triton()
    assert len(said) == 5
    for word, sentence in zip(("not installed", "gcc", "Python.h", "TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR"), said,
                              strict=True):  # fmt: skip
        assert word in sentence
    monkeypatch.setattr(triton_needs.importlib.metadata, "version", lambda name: "3.5.1")
    assert "3.5.1 is older than 3.6" in triton_needs.missing_for_triton()[0]
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "CC='no-such-compiler -O2'" in triton_needs.missing_for_triton()[1]


def test_a_cache_from_which_nothing_may_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert triton_needs._cache() == ""
    monkeypatch.setattr(triton_needs.os, "statvfs", lambda path: os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255)))
    assert "noexec" in triton_needs._cache()


# ---- packages


def test_versions_are_compared_as_numbers() -> None:
    assert satisfies("2.13.0+cpu", "torch>=2.6,<2.14")
    assert not satisfies("2.14", "torch>=2.6,<2.14")
    assert not satisfies("2.5.9", "torch>=2.6,<2.14")
    assert satisfies("2.9.0a0+145a3a7", "torch>=2.6,<2.14")
    assert satisfies("12.535", "nvidia-ml-py>=12.535")
    assert satisfies("1.0", "x==1.0.0")


@pytest.mark.parametrize(
    ("text", "name"),
    [("scikit_build_core-0.11-py3-none-any.whl", "scikit-build-core"), ("nvidia-ml-py>=12", "nvidia-ml-py"),
     ("uvloop>=0.21; sys_platform != 'win32'", "uvloop"), ("py_cpuinfo-9.0.0-py3-none-any.whl", "py-cpuinfo"),
     ("httpx2-2.16.2-py3-none-any.whl", "httpx2")],
)  # fmt: skip
def test_packages_have_one_name(text: str, name: str) -> None:
    assert package(text) == name


def test_the_wheelhouse_leaves_out_torch_and_what_comes_with_it() -> None:
    names = ("torch", "triton", "nvidia-cublas", "cuda-toolkit", "nvidia-ml-py", "torchao", "Jinja2")
    report: Any = {"install": [{"metadata": {"name": name, "version": "1"}} for name in names]}
    assert chosen(report) == ["Jinja2==1", "nvidia-ml-py==1", "torchao==1"]


NATIVE = """
import importlib.util as util, sys
spec = util.spec_from_file_location("tidegate.kernels._native", FILE)
sys.modules[spec.name] = util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
"""
"""In place of building the extension once more."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_needs_torch_and_what_the_wheelhouse_holds_and_nothing_else(tmp_path: Path) -> None:
    """The packages are those of this environment, taken one by one as pip would resolve them."""
    seen = tmp_path / "packages"
    seen.mkdir()
    names: set[str] = set()
    for need in needs():
        _with_what_it_needs(need.requirement, names)
    for name in names:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (seen / top).exists() and top != "__pycache__":
                (seen / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    venv.create(tmp_path / "only", with_pip=False, symlinks=True)
    folder = tmp_path / "only" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (seen / "native_first.py").write_text(NATIVE.replace("FILE", repr(_native.__file__)))
    (folder / "seen.pth").write_text(f"{seen}\nimport native_first\n")
    python = tmp_path / "only" / "bin" / "python"
    stages = ("links", "tests", "parity", "watching")
    done = gpu_sh(python, "--dry", "--out", str(tmp_path / "out"), *stages)
    assert done.returncode == 0, done.stdout + done.stderr


def _with_what_it_needs(text: str, names: set[str]) -> None:
    """Adds an installed package to `names`, and all that it requires; what is not installed is left out."""
    asked = Requirement(text)
    name = package(asked.name)
    if name in names:
        return
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    names.add(name)
    for one in found.requires or ():
        marker = Requirement(one).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *asked.extras)):
            _with_what_it_needs(one, names)


# ---- stages that lacked time

STUB = """#!/bin/bash
case "$*" in
  *bench.gpu.preflight*) exit 0 ;;
  *bench.gpu.sweeps*) echo '{"rows": []}'; echo Traceback, all of it >&2; exit $(cat "$CODE") ;;
  *) exec PYTHON "$@" ;;
esac
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """An interpreter whose stage `sweeps` ends with what the file $CODE says."""
    path = tmp_path / "python"
    path.write_text(STUB.replace("PYTHON", sys.executable))
    path.chmod(0o755)
    return path


def test_a_stage_that_lacked_time_is_not_done(tmp_path: Path, stub: Path) -> None:
    code, out = tmp_path / "code", tmp_path / "out"
    code.write_text("3")
    done = gpu_sh(stub, "--dry", "--out", str(out), "sweeps", CODE=str(code))
    assert (done.returncode, "run it again for the rows that lacked time" in done.stderr) == (1, True)
    assert not (out / "sweeps.json").exists()
    assert (out / "sweeps.log").read_text() == "Traceback, all of it\n"
    file_of(out, "sweeps").touch()
    code.write_text("0")
    done = gpu_sh(stub, "--dry", "--out", str(out), "sweeps", CODE=str(code))
    assert (done.returncode, (out / "sweeps.json").exists()) == (0, True)
    assert not file_of(out, "sweeps").exists(), "rows of a stage that is done are in its result"


class Sides:
    """Rows that take as many seconds as `takes` says, or what their limit allows."""

    def __init__(self, takes: dict[str, float]) -> None:
        self.takes = takes
        self.asked: list[tuple[str, float]] = []

    def __call__(self, target: Target, side: str, shape: str, *, limit: float) -> dict[str, Any]:
        self.asked.append((side, limit))
        if self.takes[side] < 0:
            return {"side": side, "not_measured": "ModuleNotFoundError: No module named 'it'"}
        if self.takes[side] > limit:
            return {"side": side, "not_measured": f"not done after {limit:.0f} s", "lacked_seconds": limit}
        return {"side": side, "seconds": self.takes[side]}


def test_rows_that_lacked_time_get_more_and_others_are_kept(tmp_path: Path) -> None:
    target = Target(True, tmp_path, "sweeps")
    sides = Sides({"quick": 5, "slow": 150, "endless": 1e9, "absent": -1})
    runs = []
    for _ in range(6):
        rows = Rows(target, sides)
        found = {side: rows.measure(f"row of {side}", side, "1b", limit=60.0) for side in sides.takes}
        runs.append((rows.lacked_time, found))
    assert runs[0][0] == ["row of slow", "row of endless"]
    assert [limit for side, limit in sides.asked if side == "slow"] == [60.0, 120.0, 240.0]
    assert [side for side, _ in sides.asked].count("quick") == 1
    assert [side for side, _ in sides.asked].count("absent") == 6, "it may be installed in between"
    lacked, found = runs[-1]
    assert lacked == [], "what had all the time of a stage has had its chance"
    assert "not done after" in found["endless"]["not_measured"]
    assert max(limit for _, limit in sides.asked) <= Target.seconds


def test_a_row_for_which_no_time_is_left_does_not_begin(tmp_path: Path) -> None:
    sides = Sides({"quick": 5})
    rows = Rows(Target(True, tmp_path, "sweeps"), sides)
    rows._end -= Target.seconds
    row = rows.measure("late", "quick", "1b", limit=60.0)
    assert (sides.asked, rows.lacked_time) == ([], ["late"])
    assert "no time left" in row["not_measured"]
    assert Rows(Target(True, tmp_path, "sweeps"), sides).measure("late", "quick", "1b", limit=60.0)["seconds"] == 5


FAILING = """#!/bin/bash
printf 'Traceback (most recent call last):\\n  File "side.py", line 1\\ntorch.OutOfMemoryError: no room\\nwarned\\n' >&2
exit 1
"""


def test_a_side_that_fails_leaves_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side = tmp_path / "python"
    side.write_text(FAILING)
    side.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(side))
    row = run_side(Target(True, tmp_path), "zero3_cpu", "toy", limit=100.0)
    assert row["not_measured"] == "torch.OutOfMemoryError: no room", "not the warning behind it"
    assert row["traceback"][0].startswith("Traceback")
    assert "Traceback" in capsys.readouterr().err, "the stage's log has it, too"
    assert "lacked_seconds" not in row
