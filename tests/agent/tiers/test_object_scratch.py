"""What runs leave in an object store: processes that were killed, one that lives, and how they are told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent.tiers.object_server import BUCKET, S3Server, gate, s3_server, settings_of, use_credentials
from tests.cli.doctor.test_storage_paths import doctor
from tests.services import ROOT, until
from tidegate.agent.procfs import start_ticks
from tidegate.agent.tiers import object_scratch
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.object_scratch import (
    ALIVE_SECONDS,
    DEAD_SECONDS,
    _liveness,
    find_object_leftovers,
    remove_objects,
)
from tidegate.agent.tiers.scratch_owner import Owner
from tidegate.cli.doctor.storage_paths import examine_paths
from tidegate.errors import PathUnusable, ScratchTaken

TRAINER = """
import sys
from tidegate.agent.tiers.state_file import StateKind
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.kernels import aligned_buffer

path = ObjectPath("store", ObjectSettings(url=sys.argv[2], endpoint=sys.argv[1], block_bytes=16384), sys.argv[3], 2)
path.make(StateKind("adamw", 2, 0, 12_800, 1, 8))
memory = aligned_buffer(102_400)
path.write(0, memory.ctypes.data, 1)
print("ready", flush=True)
sys.stdin.read()
path.close()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@contextmanager
def trainer(server: S3Server, prefix: str, run: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the state of a subgroup there until it is killed, or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, server.endpoint, f"s3://{BUCKET}/{prefix}", run],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_the_dead_are_listed_and_removed_and_the_living_stay(server: S3Server, tmp_path: Path) -> None:
    where = ("--path", f"s3://{BUCKET}/doctor", "--endpoint", server.endpoint)
    with trainer(server, "doctor", "killed") as victim:
        victim.kill()
        victim.wait()
    with trainer(server, "doctor", "alive") as living:
        code, said = doctor(tmp_path, *where)
        assert code == 0
        assert f"s3://{BUCKET}/doctor/tidegate-killed/rank2: 0.1 MB, " in said
        assert "which is dead: remove it with --remove" in said
        assert said.count("in use by process") == 1
        code, said = doctor(tmp_path, *where, "--remove")
        assert (code, "Add --yes to remove the state of 1 dead ranks" in said) == (2, True), said
        code, said = doctor(tmp_path, *where, "--remove", "--yes", "--json")
        findings = json.loads(said)
        assert (code, [found["verdict"] for found in findings]) == (0, ["good"])
        assert findings[0]["detail"].startswith(f"removed s3://{BUCKET}/doctor/tidegate-killed/rank2")
        kept = server.keys("doctor")
        assert len(kept) == 7 + 1
        assert all(key.startswith("doctor/tidegate-alive/rank2/") for key in kept)
        living.communicate("")
        assert living.returncode == 0
    assert server.keys("doctor") == []
    code, said = doctor(tmp_path, *where)
    assert (code, "no state of any run" in said) == (0, True)


def test_the_doctor_tries_an_object(server: S3Server) -> None:
    with gate(server) as front:
        place = f"s3://{BUCKET}/tried"
        tried, state = examine_paths([place], front.endpoint)
        assert (tried.verdict, tried.detail) == ("good", f"{place}: an object was put, read back and removed")
        assert (state.detail, server.keys("tried")) == (f"{place}: no state of any run", [])
        front.answer = lambda asked: 403 if asked.method == "PUT" else None
        (refused,) = examine_paths([place], front.endpoint)
        assert refused.verdict == "bad"
        assert "These credentials do not allow reading, writing and deleting there" in refused.detail


def test_the_doctor_names_a_store_that_it_cannot_list(server: S3Server, tmp_path: Path) -> None:
    code, said = doctor(tmp_path, "--path", "s3://nowhere/x", "--endpoint", server.endpoint)
    assert (code, "s3://nowhere/x" in said, "NoSuchBucket" in said) == (1, True, True), said
    code, said = doctor(tmp_path, "--path", "gs://bucket/x")
    assert (code, "is not s3://bucket/prefix" in said) == (2, True), said


ME = Owner.of_this_process("run", 0)
ELSEWHERE = replace(ME, boot_id="another", host="another")
CONTAINER = replace(ME, pid_namespace="pid:[1]")


@pytest.mark.parametrize(
    ("owner", "lease_age", "alive"),
    [
        (ME, 0.0, "yes"),
        (ME, 10 * DEAD_SECONDS, "yes"),  # stopped for a day, but there
        (replace(ME, process_start_ticks=1), 0.0, "no"),  # another process has its number
        (replace(ME, pid=2**22 + 1), 0.0, "no"),
        (ELSEWHERE, 0.0, "yes"),
        (ELSEWHERE, ALIVE_SECONDS + 1, "unknown"),
        (ELSEWHERE, DEAD_SECONDS + 1, "no"),
        (CONTAINER, 0.0, "yes"),
        (replace(CONTAINER, pid=2**22 + 1), ALIVE_SECONDS + 1, "unknown"),
        (None, 0.0, "unknown"),
        (None, 10 * DEAD_SECONDS, "unknown"),
    ],
)
def test_who_is_alive(owner: Owner | None, lease_age: float, alive: str) -> None:
    assert _liveness(owner, lease_age) == alive


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(ME, pid=process.pid, process_start_ticks=start_ticks(process.pid))
    assert _liveness(owner, 0.0) == "yes"
    process.kill()
    until(lambda: _liveness(owner, 0.0) == "no", "a dead process that nobody has waited for")
    process.communicate()


def test_what_lives_or_cannot_be_told_is_not_removed(server: S3Server) -> None:
    settings = settings_of(server.endpoint, "told")
    with closing(ObjectPath("store", settings, "run", 0)):
        (found,) = find_object_leftovers(settings)
        assert (found.alive, found.run, found.rank, found.owner is not None) == ("yes", "run", 0, True)
        with pytest.raises(ScratchTaken, match="is in use"):
            remove_objects(found)
        server.put("told/tidegate-run/rank0/owner.json", b'{"pid": true')
        (found,) = find_object_leftovers(settings)
        assert (found.alive, found.owner) == ("unknown", None)
        with pytest.raises(ScratchTaken, match="may be"):
            remove_objects(found)
    assert find_object_leftovers(settings) == []


def test_one_that_came_back_to_life_since_it_was_found_is_not_removed(server: S3Server) -> None:
    settings = settings_of(server.endpoint, "back")
    with closing(ObjectPath("store", settings, "run", 0)) as path:
        (found,) = find_object_leftovers(settings)
        with pytest.raises(ScratchTaken):
            remove_objects(replace(found, alive="no"))
        assert server.keys("back")
        path.close()
        remove_objects(replace(found, alive="no"))


def test_removal_takes_the_lease_last(server: S3Server) -> None:
    with trainer(server, "last", "killed") as victim:
        victim.kill()
        victim.wait()
    with gate(server) as front:
        (found,) = find_object_leftovers(settings_of(front.endpoint, "last"))
        assert found.alive == "no"
        removals: list[Any] = []
        front.answer = lambda asked: (
            403 if asked.method == "POST" and removals.append(asked) is None and len(removals) == 2 else None  # type: ignore[func-returns-value]
        )
        with pytest.raises(PathUnusable):
            remove_objects(found)
        assert server.keys("last") == ["last/tidegate-killed/rank2/owner.json"]
        front.answer = lambda _: None
        remove_objects(found)
    assert server.keys("last") == []


def test_the_lease_is_renewed(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_scratch, "LEASE_SECONDS", 0.01)
    with gate(server) as front:
        with closing(ObjectPath("store", settings_of(front.endpoint, "lease"), "run", 0)) as path:
            until(lambda: len(front.asked) > 3, "renewals of the lease")
            front.answer = lambda _: 500  # a store that is away for a while
            until(lambda: len(front.asked) > 8, "more of them")
            front.answer = lambda _: None
            until(lambda: server.keys("lease"), "the lease")
            path.close()
            asked = len(front.asked)
        assert len(front.asked) == asked
        assert "tidegate-lease" not in {thread.name for thread in threading.enumerate()}
    assert os.path.basename(front.asked[0].path) == "owner.json"
    assert server.keys("lease") == []
