"""`tidegate doctor --path`: processes that were killed, one that lives, and what is left of each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.agent.tiers.trainer import trainer
from tests.services import ROOT
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

    found = storage_paths.find_leftover_state([path])
    assert [f.detail for f in storage_paths.remove_dead(found, False, no)] == ["nothing was removed"]
    assert "Remove the state of 1 dead ranks, 0.1 MB?" in asked[0]
    assert os.listdir(path) == ["tidegate-killed"]
    storage_paths.remove_dead(found, False, lambda _: True)
    assert os.listdir(path) == []


def test_one_of_which_nobody_can_tell_stays(path: Path) -> None:
    with trainer(path, "killed", 3) as other:
        other.kill()
    (path / "tidegate-killed" / "rank3" / "owner.json").write_text("{")
    found = storage_paths.find_leftover_state([path])
    assert "it is unknown whether that process is alive" in storage_paths.findings([path], found)[0].detail
    storage_paths.remove_dead(found, True, lambda _: True)
    assert os.listdir(path) == ["tidegate-killed"]


def test_misuse_is_told(tmp_path: Path, path: Path) -> None:
    code, said = doctor(tmp_path, "--remove")
    assert (code, "--path DIRECTORY" in said) == (2, True)
    code, said = doctor(tmp_path, "--path", str(path / "nowhere"))
    assert (code, "does not exist: create it first" in said) == (1, True)
    assert storage_paths.findings([path], [])[0].verdict == "good"
    with trainer(path, "killed", 1) as other:
        other.kill()
    found = storage_paths.find_leftover_state([path])
    with pytest.raises(ConfigError, match="--yes"):
        storage_paths.remove_dead(found, False, lambda _: True)
