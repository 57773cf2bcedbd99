"""`tidegate doctor --path`: processes that were killed, one that lives, and what is left of each."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import forked
from tests.agent.tiers.faults import in_namespace, require_mounts
from tests.agent.tiers.trainer import trainer
from tests.alerts.test_rules import alerts
from tests.services import ROOT
from tidegate import units
from tidegate.agent.tiers.directory_probe import FileSystem
from tidegate.cli.doctor import storage_paths
from tidegate.errors import ConfigError


def doctor(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code, and all that it said, on one line. Nobody is there to answer."""
    env = {**os.environ, "TIDEGATE_STATE_DIR": str(folder / "state"), "TIDEGATE_DAEMON": "http://127.0.0.1:9"}
    done = forked.run(
        [sys.executable, "-m", "tidegate", "doctor", *words],
        cwd=ROOT, env=env, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "nvme"
    made.mkdir()
    return made


def test_the_dead_are_listed_and_removed_and_the_living_stay(tmp_path: Path, path: Path) -> None:
    with trainer(path, "killed", 3) as other:
        other.kill()
    with trainer(path, "alive", 0):
        code, said = doctor(tmp_path, "--path", str(path))
        assert code == 0
        assert "tidegate-killed/rank3: 0.1 MB, " in said
        assert "which is dead: remove it with --remove" in said
        assert said.count("in use by process") == 1
        code, said = doctor(tmp_path, "--path", str(path), "--remove")
        assert (code, "Add --yes to remove the state of 1 dead ranks" in said) == (2, True), said
        assert f"{path}/tidegate-killed/rank3" in said
        assert len(os.listdir(path)) == 2
        code, said = doctor(tmp_path, "--path", str(path), "--remove", "--yes", "--json")
        findings = json.loads(said)
        assert (code, [found["verdict"] for found in findings]) == (0, ["good"])
        assert findings[0]["detail"].startswith(f"removed {path}/tidegate-killed/rank3")
        assert os.listdir(path) == ["tidegate-alive"]
        code, said = doctor(tmp_path, "--path", str(path), "--remove", "--yes")
        assert (code, "nothing to remove" in said, os.listdir(path)) == (0, True, ["tidegate-alive"])


def test_who_says_no_keeps_everything(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(path, "killed", 3) as other:
        other.kill()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    assert [f.detail for f in storage_paths.remove_dead([str(path)], "", False, no)] == ["nothing was removed"]
    assert "Remove the state of 1 dead ranks, 0.1 MB?" in asked[0]
    assert os.listdir(path) == ["tidegate-killed"]
    storage_paths.remove_dead([str(path)], "", False, lambda _: True)
    assert os.listdir(path) == []


def test_one_of_which_nobody_can_tell_stays(path: Path) -> None:
    with trainer(path, "killed", 3) as other:
        other.kill()
    (path / "tidegate-killed" / "rank3" / "owner.json").write_text("{")
    assert "it is unknown whether that process is alive" in storage_paths.examine_paths([str(path)])[-1].detail
    storage_paths.remove_dead([str(path)], "", True, lambda _: True)
    assert os.listdir(path) == ["tidegate-killed"]


def test_misuse_is_told(tmp_path: Path, path: Path) -> None:
    code, said = doctor(tmp_path, "--remove")
    assert (code, "--path DIRECTORY" in said) == (2, True)
    code, said = doctor(tmp_path, "--path", str(path / "nowhere"))
    assert (code, "does not exist: create it first" in said) == (1, True)
    with trainer(path, "killed", 1) as other:
        other.kill()
    with pytest.raises(ConfigError, match="--yes"):
        storage_paths.remove_dead([str(path)], "", False, lambda _: True)


def test_a_path_is_written_and_read_and_its_disk_is_named(path: Path) -> None:
    space, tried, state = storage_paths.examine_paths([str(path)])
    status = os.statvfs(path)
    assert f"size {units.nbytes(status.f_blocks * status.f_frsize)}, free " in space.detail
    assert tried.detail.startswith(f"{path}: a file was written, read back and removed, with ")
    assert (tried.verdict, state.detail, os.listdir(path)) == ("good", f"{path}: no state of any run", [])


def test_the_share_that_would_be_free_is_never_rounded_up_to_the_limit_of_the_alert() -> None:
    on = FileSystem("/nvme", "ext4", "/dev/nvme0n1p1", 200_000_000, 5_000_000)
    found = storage_paths._space("/nvme/tide", on, 14_990_000)
    assert found.verdict == "missing"
    assert found.detail == (
        "/nvme/tide: on /nvme (ext4, /dev/nvme0n1p1), size 200 MB, free 5.00 MB (2.5 %), 9.9 % without the state of "
        "runs there; TidegatePathNearlyFull fires below 10.0 %"
    )
    assert f"< {storage_paths.NEARLY_FULL}" in str(alerts()["TidegatePathNearlyFull"]["expr"])
    enough = storage_paths._space("/nvme/tide", replace(on, free_bytes=20_000_000), 0)
    assert (enough.verdict, enough.detail.endswith("free 20.0 MB (10.0 %)")) == ("good", True)


def test_a_directory_on_the_root_file_system_is_named() -> None:
    found = storage_paths._space("/nvme/tide", FileSystem("/", "ext4", "/dev/vda", 1000, 900), 0)
    assert (found.verdict, "is the disk of this path mounted?" in found.detail) == ("missing", True)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["doctor_after_io_errors", "doctor_of_paths_that_take_nothing"])
def test_file_systems_that_really_fail(scenario: str, tmp_path: Path) -> None:
    require_mounts("losetup", "mkfs.ext4")
    in_namespace(scenario, tmp_path)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOTCONN, "is cut off from its file system: Transport endpoint is not connected. Unmount it"),
        (errno.ESTALE, "is cut off from its file system: Stale file handle. Unmount it (umount -l), and mount it"),
        (errno.EIO, "cannot be read or written: Input/output error. Find the cause in the kernel's log"),
        (errno.EACCES, "is not open to user "),
        (errno.ENFILE, "cannot be used: Too many open files in system."),
    ],
)
@pytest.mark.parametrize("call", ["scandir", "statvfs", "fsync"])
def test_each_error_of_the_system_is_a_finding(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, said: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fails)
    bad = [finding.detail for finding in storage_paths.examine_paths([str(path)]) if finding.verdict == "bad"]
    monkeypatch.undo()
    assert len(bad) == 1
    assert bad[0].startswith(f"{path} {said}")
    assert os.listdir(path) == []
