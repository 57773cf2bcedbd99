"""What users install: the wheel is complete, extras pull what they say, and the daemon's half runs without torch."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
PARTS = ("agent", "daemon", "dashboard", "kernels")
# The environment must not leak into the clean one.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}


def run(*command: str | Path, cwd: Path) -> str:
    """The output of `command`; it is shown when the command fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def sources() -> set[str]:
    """Every Python file of the package, by its path in a wheel."""
    files = (path.relative_to(ROOT) for top in ("tidegate", *PARTS) for path in (ROOT / top).rglob("*.py"))
    return {str(f if f.parts[0] == "tidegate" else "tidegate" / f) for f in files}


@pytest.fixture(scope="module")
def expected() -> set[str]:
    """Taken before the build: a file that is saved meanwhile may or may not be in it."""
    return sources()


@pytest.fixture(scope="module")
def dist(expected: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds tidegate[daemon,dashboard] and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    run(
        folder / "bin" / "python",
        *("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"),
        f"tidegate[daemon,dashboard] @ {wheel.as_uri()}",
        cwd=folder,
    )
    return folder / "bin"


def test_the_wheel_is_complete_and_holds_no_sources_of_the_extension(wheel: Path, expected: set[str]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert "tidegate/py.typed" in names
    assert any(re.fullmatch(r"tidegate/kernels/_native\..*\.so", name) for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert {name.split("/")[0] for name in names} == {"tidegate", "tidegate-0.1.0.dist-info"}


def test_the_sdist_holds_the_parts(dist: Path, expected: set[str]) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= names
    assert {"kernels/src/module.cpp", "CMakeLists.txt", "LICENSE"} <= names


def requirements(wheel: Path, extra: str | None) -> set[str]:
    """Names that the wheel's metadata asks for, with one extra or with none."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read("tidegate-0.1.0.dist-info/METADATA").decode())
    found = set()
    for line in metadata.get_all("Requires-Dist", []):
        name, marker = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        assert name is not None
        if (marker.group(1) if marker else None) == extra:
            found.add(name.group().lower())
    return found


@pytest.mark.parametrize(
    ("extra", "has", "lacks"),
    [
        (
            None,
            {"cachetools", "httpx", "pydantic", "rich", "typer", "tenacity"},
            {"torch", "numpy", "fastapi", "streamlit"},
        ),
        ("agent", {"torch", "numpy", "prometheus-client"}, {"streamlit", "fastapi", "tidegate"}),
        ("s3", {"obstore", "boto3"}, {"streamlit", "fastapi", "moto"}),
        ("daemon", {"fastapi", "sqlalchemy"}, {"torch", "streamlit", "tidegate"}),
        ("dashboard", {"streamlit", "plotly"}, {"torch", "fastapi", "tidegate"}),
    ],
)
def test_extras_pull_what_they_say(wheel: Path, extra: str | None, has: set[str], lacks: set[str]) -> None:
    names = requirements(wheel, extra)
    assert has <= names
    assert not lacks & names


def test_daemon_and_dashboard_import_without_torch(clean: Path, tmp_path: Path) -> None:
    program = """
import importlib.util, tidegate, tidegate.daemon, tidegate.dashboard
assert importlib.util.find_spec("torch") is None
"""
    run(clean / "python", "-W", "error", "-c", program, cwd=tmp_path)


def test_the_command_line_helps_without_torch(clean: Path, tmp_path: Path) -> None:
    assert "daemon" in run(clean / "tidegate", "--help", cwd=tmp_path)


@pytest.fixture
def daemon(clean: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running `tidegate daemon` and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path / "log").open("wb")
    command = [clean / "tidegate", "daemon", "--port", str(port), "--state-dir", tmp_path / "state"]
    with log, subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_the_daemon_starts_without_torch(daemon: tuple[subprocess.Popen[bytes], str], tmp_path: Path) -> None:
    process, url = daemon
    for _ in range(300):
        try:
            assert httpx.get(f"{url}/healthz").status_code == 200
            return
        except httpx.TransportError:  # not there yet: wait for it, or for its end
            try:
                process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            break
    pytest.fail(f"the daemon does not answer:\n{(tmp_path / 'log').read_text()[-4000:]}")
