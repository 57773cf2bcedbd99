"""Paths in an object store, against a real S3 server: what is stored comes back, and what fails has a name."""

from __future__ import annotations

import copy
import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import tidegate
from tests.agent.engine.test_tiered_exactness import Event
from tests.agent.tiers.faults import Snapshot, lives, store_of, train, training
from tests.agent.tiers.object_server import (
    BUCKET,
    ENVIRONMENT,
    SECRET,
    Asked,
    Gate,
    S3Server,
    gate,
    s3_server,
    settings_of,
    use_credentials,
)
from tests.examples import examples
from tests.services import ROOT, free_port
from tidegate.agent.tiers import object_blocks
from tidegate.agent.tiers.object_blocks import Job
from tidegate.agent.tiers.object_path import ObjectPath
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.state_file import StateKind, padded_bytes
from tidegate.errors import BlockDamaged, ConfigError, DataTruncated, PathFailed, PathFull, PathUnusable, StateLost
from tidegate.kernels import aligned_buffer
from tidegate.knobs.knobs import Knobs


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


@pytest.fixture
def front(server: S3Server) -> Iterator[Gate]:
    with gate(server) as made:
        yield made


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


def kind(subgroup: int = 0, numel: int = 5000) -> StateKind:
    return StateKind("adamw", 0, subgroup, numel, 1, 8)


def random_state(nbytes: int, seed: int) -> Any:
    memory = aligned_buffer(padded_bytes(nbytes))
    memory[:nbytes] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def made_path(settings: ObjectSettings, run: str = "r") -> ObjectPath:
    return ObjectPath("store", settings, run, 0)


def written(path: ObjectPath, step: int, nbytes: int = 40_000, subgroup: int = 0) -> Any:
    memory = random_state(nbytes, step)
    path.write(subgroup, memory.ctypes.data, step)
    return memory


def read(path: ObjectPath, nbytes: int = 40_000, subgroup: int = 0) -> Any:
    memory = aligned_buffer(padded_bytes(nbytes))
    memory[:] = 1
    path.read(subgroup, memory.ctypes.data)
    return memory


# ---- one path alone


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numel=st.integers(1, 12_000), block=st.sampled_from([4096, 8192, 1 << 20]), threads=st.integers(1, 4),
    steps=st.integers(1, 3),
)  # fmt: skip
def test_what_is_written_is_read(server: S3Server, numel: int, block: int, threads: int, steps: int) -> None:
    one, nbytes = kind(7, numel), 8 * numel
    with closing(made_path(settings_of(server.endpoint, "alone", block_bytes=block, threads=threads))) as path:
        path.make(one)
        assert not read(path, nbytes, 7).any()
        for step in range(1, steps + 1):
            sent = written(path, step, nbytes, 7)
            assert path.states[7].step == step
            assert np.array_equal(sent, read(path, nbytes, 7))
        assert path.counters.bytes == {"read": steps * len(sent), "write": steps * len(sent)}
        assert not path.counters.errors["read"] + path.counters.errors["write"]
    assert server.keys("alone") == []


def test_whoever_wants_to_know_is_told_when_all_is_queued(server: S3Server) -> None:
    with closing(made_path(settings_of(server.endpoint, "begun"))) as path:
        path.make(kind())
        memory, told = random_state(40_000, 1), []
        path.write(0, memory.ctypes.data, 1, lambda: told.append(path.busy))
        path.read(0, memory.ctypes.data, lambda: told.append(path.busy))
        assert told == [True, True]


def test_calibration_measures_and_leaves_nothing(server: S3Server) -> None:
    with closing(made_path(settings_of(server.endpoint, "calibrated"))) as path:
        speeds = path.calibrate(100_000)
        assert min(speeds.read_bytes_per_second, speeds.write_bytes_per_second) > 0
        assert path.counters.bytes == {"read": 0, "write": 0}
    assert server.keys("calibrated") == []


def test_calibration_refuses_a_store_that_returns_other_data(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(made_path(settings_of(server.endpoint, "damaging"))) as path:
        measured = path._mover.seconds

        def damaged(jobs: Sequence[Job]) -> float:
            seconds = measured(jobs)
            for key in server.keys("damaging"):
                if key.endswith("/00000"):
                    server.put(key, flipped(server.get(key)))
            return seconds

        monkeypatch.setattr(path._mover, "seconds", damaged)
        with pytest.raises(PathUnusable, match=r"not what was written before.*has a damaged block"):
            path.calibrate(100_000)


def test_what_interrupts_a_read_twice_is_raised_when_no_thread_uses_the_memory_any_more(
    server: S3Server, front: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does that is pressed again because a slow store has not answered the first one."""
    asked, release, ended = threading.Event(), threading.Event(), []

    def late(request: Asked) -> None:
        if request.method == "GET" and request.path.endswith("/00000"):
            asked.set()
            release.wait(60)
            ended.append(request)

    def interrupted(*given: Any, **named: Any) -> Any:
        waits.append(1)
        if len(waits) <= 2:
            assert asked.wait(60)
            raise KeyboardInterrupt
        release.set()
        return wait(*given, **named)

    waits: list[int] = []
    wait = object_blocks.wait
    with closing(made_path(settings_of(front.endpoint, "twice"))) as path:
        path.make(kind())
        memory = written(path, 1)
        front.answer = late
        monkeypatch.setattr(object_blocks, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            path.read(0, memory.ctypes.data)
        assert ended
        assert len(waits) >= 3


def test_a_flush_that_fails_leaves_the_one_before(server: S3Server, front: Gate) -> None:
    with closing(made_path(settings_of(front.endpoint, "half"))) as path:
        path.make(kind())
        first = written(path, 1)
        front.answer = lambda asked: 403 if asked.method == "PUT" and asked.path.endswith("/00001") else None
        with pytest.raises(PathFailed, match=r"write the state of subgroup 0 after step 2.*403 Forbidden") as failed:
            written(path, 2)
        assert (failed.value.path, failed.value.subgroup, failed.value.errno) == ("store", 0, errno.EACCES)
        assert path.states[0].step == 1
        assert np.array_equal(first, read(path))
    assert server.keys("half") == []


def test_no_object_is_written_twice_and_the_old_ones_go_after_the_new_ones_are_there(front: Gate) -> None:
    with closing(made_path(settings_of(front.endpoint, "keys"))) as path:
        path.make(kind())
        for step in (1, 2, 2, 3):
            written(path, step)
    data = [asked for asked in front.asked if asked.method != "PUT" or "owner.json" not in asked.path]
    puts = [asked.path for asked in data if asked.method == "PUT"]
    assert len(set(puts)) == len(puts) == 4 * 3
    assert all(f"/000000-step{step}-" in key for step, key in zip([1] * 3 + [2] * 6 + [3] * 3, puts, strict=True))
    firsts = [place for place, asked in enumerate(data) if asked.method == "POST"]
    assert all(sum(asked.method == "PUT" for asked in data[:place]) >= 6 for place in firsts)


def test_capacity_is_a_bound(server: S3Server) -> None:
    with closing(made_path(settings_of(server.endpoint, "bound", capacity_bytes=100_000))) as path:
        path.make(kind(0))
        path.make(kind(1))
        assert (path.capacity_bytes, path.free_bytes) == (100_000, 100_000 - 2 * 40_960)
        with pytest.raises(PathFull, match="100,000") as full:
            path.make(kind(2))
        assert (full.value.needed_bytes, full.value.free_bytes) == (40_960, 100_000 - 2 * 40_960)
        path.remove(0)
        path.make(kind(2))
    with closing(made_path(settings_of(server.endpoint, "bound"))) as path:
        assert (path.capacity_bytes, path.free_bytes) == (None, None)


def test_a_child_that_was_forked_takes_nothing_away(server: S3Server) -> None:
    with closing(made_path(settings_of(server.endpoint, "forked"))) as path:
        path.make(kind())
        written(path, 1)
        child = os.fork()
        if not child:
            path.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(server.keys("forked")) == 3 + 1
        read(path)


def test_exclusive_access_goes_by_bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for prefix in ("lock-a", "lock-b"):
        with closing(made_path(settings_of(server.endpoint, prefix, lock_slots=1))) as path:
            path.make(kind())
            written(path, 1)
            assert path.lock_timeouts == 0
    assert len(list(tmp_path.glob("tidegate/s3-*.lock"))) == 1


def test_several_threads_move_the_state_of_several_subgroups(server: S3Server) -> None:
    with closing(made_path(settings_of(server.endpoint, "threads"))) as path, ThreadPoolExecutor(4) as threads:
        for subgroup in range(8):
            path.make(kind(subgroup))

        def there_and_back(subgroup: int) -> bool:
            found = [
                np.array_equal(written(path, 10 * subgroup + step, subgroup=subgroup), read(path, subgroup=subgroup))
                for step in range(1, 4)
            ]
            return all(found)

        assert all(threads.map(there_and_back, range(8)))
        assert path.counters.bytes == {"read": 24 * 40_960, "write": 24 * 40_960}
        assert not path.busy
    assert server.keys("threads") == []


# ---- what may pass, and what may not


@pytest.mark.parametrize("status", [503, 500, 429, 0])
def test_a_refusal_that_passes_is_tried_again(front: Gate, status: int) -> None:
    with closing(made_path(settings_of(front.endpoint, "again", retry_seconds=30.0))) as path:
        path.make(kind())
        found = []
        moves: dict[str, Callable[[], Any]] = {"PUT": lambda: written(path, 1), "GET": lambda: read(path)}
        for operation, (method, move) in zip(("write", "read"), moves.items(), strict=True):
            left = [status] * 2

            def refuse(asked: Asked, left: list[int] = left, method: str = method) -> int | None:
                return left.pop() if left and asked.method == method and asked.path.endswith("/00001") else None

            front.answer = refuse
            found.append(move())
            assert (path.counters.retries[operation], path.counters.errors[operation]) == (2, 2)
        assert np.array_equal(*found)


def test_what_does_not_pass_is_not_tried_again(front: Gate) -> None:
    with closing(made_path(settings_of(front.endpoint, "once", retry_seconds=30.0))) as path:
        path.make(kind())
        front.answer = lambda asked: 400 if asked.method == "PUT" else None
        with pytest.raises(PathFailed, match="400 Bad Request, Injected"):
            written(path, 1)
        assert path.counters.retries["write"] == 0


# ---- start


def start(paths: dict[str, Any]) -> None:
    tidegate.AdamW([torch.nn.Parameter(torch.zeros(10))], offload=tidegate.Offload(paths=paths)).close()


def test_a_store_that_cannot_work_says_so_at_the_start(
    server: S3Server, front: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = settings_of(server.endpoint, "start")
    (tmp_path / "dir").mkdir()
    missing = ObjectSettings(url="s3://nowhere/x", endpoint=server.endpoint)
    with pytest.raises(PathUnusable, match=r"s3://nowhere/x.*404 Not Found, NoSuchBucket.*Create the bucket"):
        start({"dir": tmp_path / "dir", "store": missing})
    assert os.listdir(tmp_path / "dir") == []
    with pytest.raises(PathUnusable, match=r"Connection refused.*Check that the endpoint is right"):
        start({"store": settings_of(f"http://127.0.0.1:{free_port()}", "start")})
    front.answer = lambda _: 403
    with pytest.raises(PathUnusable, match=r"403 Forbidden, Injected.*policy"):
        start({"store": settings_of(front.endpoint, "start")})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(PathUnusable, match=r"needs credentials: none were found\. Set AWS_ACCESS_KEY_ID"):
        start({"store": good})


def test_a_key_that_the_server_does_not_know_is_refused() -> None:
    with (
        s3_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as strict,
        pytest.raises(PathUnusable, match="403 Forbidden, InvalidAccessKeyId") as refused,
    ):
        start({"store": settings_of(strict.endpoint, "strict")})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("module", ["obstore", "boto3"])
def test_without_the_extra_its_name_is_said(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}: pip install 'tidegate\[s3\]'"):
        start({"store": "s3://bucket/prefix"})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "s3://"}, "s3://bucket/prefix"),
        ({"url": "gs://bucket/x"}, "s3://bucket/prefix"),
        ({"url": "s3://key:hush@bucket/x"}, "they come from the environment"),
        ({"url": "s3://bucket/x?region=a"}, "s3://bucket/prefix"),
        ({"url": "s3://b/x", "endpoint": "127.0.0.1:9000"}, "http://127.0.0.1:9000"),
        ({"url": "s3://b/x", "endpoint": "http://127.0.0.1:port"}, "http://127.0.0.1:9000"),
        ({"url": "s3://b/x", "endpoint": "http://key:hush@host"}, "they come from the environment"),
        ({"url": "s3://b/x", "threads": 0}, "threads=0"),
        ({"url": "s3://b/x", "block_bytes": 5000}, "multiple of 4096"),
        ({"url": "s3://b/x", "timeout_seconds": 0}, "timeout_seconds=0"),
        ({"url": "s3://b/x", "retry_seconds": -1}, "retry_seconds=-1"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        tidegate.ObjectSettings(**wrong)
    assert "hush" not in str(refused.value)


def test_addresses_are_told_from_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = tidegate.Offload(paths={"a": "s3://bucket/some/prefix/", "b": "/s3", "c": Path("s3:/x")})
    found = offload.path_settings()
    assert isinstance(found["a"], ObjectSettings)
    assert (found["a"].bucket, found["a"].prefix, found["a"].server) == ("bucket", "some/prefix", "")
    assert {type(found[name]) for name in "bc"} == {tidegate.PathSettings}
    with pytest.raises(ConfigError, match="'ftp://x/y' is not s3://bucket/prefix"):
        tidegate.Offload(paths={"a": "ftp://x/y"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000/")
    assert found["a"].server == "http://127.0.0.1:9000"


# ---- training


def two(server: S3Server | Gate, tmp_path: Path, prefix: str, **changes: Any) -> dict[str, Any]:
    (tmp_path / "dir").mkdir(exist_ok=True)
    return {"dir": tmp_path / "dir", "store": settings_of(server.endpoint, prefix, **changes)}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float16))]
)
def test_state_moves_between_a_directory_and_a_store_and_equals_the_oracle(
    server: S3Server, tmp_path: Path, dtype: torch.dtype
) -> None:
    tour = [
        Knobs(stride=2.0, tier_split="store:1", host_cache=0),
        Knobs(stride="off", tier_split="dir:1,store:1", host_cache=0),
        Knobs(stride=2.0, tier_split="dir:1", host_cache=0),
        Knobs(stride=3.0, tier_split="dir:1,store:3", host_cache=90_000, order="alternate"),
        Knobs(stride=1.0, tier_split="auto", host_cache=0),
        Knobs(stride=2.0, static_ratio=0.5, tier_split="store:1", host_cache=0),
    ]
    with training(two(server, tmp_path, "tour"), dtype) as pair:
        for step, knobs in enumerate(tour):
            pair.happens(Event("knobs", 0, knobs))
            train(pair, step)
            if not knobs.static_ratio and not knobs.host_cache and knobs.tier_split != "auto":
                assert lives(pair) == {part.split(":")[0] for part in str(knobs.tier_split).split(",")}
        pair.assert_same_state()
        pair.happens(Event("round trip", 0, Knobs()))
        train(pair, 9, 2)
        pair.assert_same_state()
        assert server.keys("tour")
    assert server.keys("tour") == []


def test_a_checkpoint_goes_to_a_directory_and_resumes_on_any_paths(server: S3Server, tmp_path: Path) -> None:
    with training(two(server, tmp_path, "saved"), tier_split="dir:1,store:1") as pair:
        train(pair, 0, 2)
        saved = Snapshot.of(pair)
        pair.optimizer.save_checkpoint(tmp_path / "checkpoints")
        (found,) = tidegate.find_checkpoints(tmp_path / "checkpoints")
        assert len(list(found.folder.glob("*.tide"))) == 8
        train(pair, 2, 2)
    for split in ("store:1", "dir:1"):
        with training(two(server, tmp_path, "resumed"), tier_split=split) as pair:
            for param, weight in zip(pair.params, saved.weights, strict=True):
                param.data.copy_(weight)
            pair.optimizer.load_checkpoint(tmp_path / "checkpoints")
            pair.plain.params = copy.deepcopy(saved.plain)
            pair.assert_same_state()
            train(pair, 2, 2)
            assert lives(pair) == {split[:-2]}
            pair.assert_same_state()


def test_a_store_that_refuses_writes_is_retired_and_nothing_is_lost(
    server: S3Server, front: Gate, tmp_path: Path
) -> None:
    with training(two(front, tmp_path, "retired"), tier_split="dir:1,store:1") as pair:
        train(pair, 0, 2)
        front.answer = lambda asked: 403 if asked.method == "PUT" else None
        train(pair, 2)
        store = store_of(pair.optimizer)
        assert "403 Forbidden" in store.retired["store"]
        assert lives(pair) == {"dir"}
        assert store.paths["dir"].counters.taken_over_bytes > 0
        train(pair, 3, 2)
        pair.assert_same_state()


def test_when_the_server_is_killed_what_is_lost_is_named_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    with s3_server() as server, training(two(server, tmp_path, "killed"), tier_split="dir:1,store:1") as pair:
        train(pair, 0, 2)
        pair.optimizer.save_checkpoint(tmp_path / "checkpoints")
        saved = Snapshot.of(pair)
        train(pair, 2)
        server.kill()
        with pytest.raises(StateLost, match=r"on path store, is lost: Path store failed to read.*Connection") as lost:
            train(pair, 3)
        assert (lost.value.path, lost.value.step) == ("store", 3)
        assert lost.value.checkpoint == str(tmp_path / "checkpoints" / "step-2")
        assert "store" in store_of(pair.optimizer).retired
        saved.load(pair)
        train(pair, 2, 2)
        assert lives(pair) == {"dir"}
        pair.assert_same_state()


def flipped(body: bytes) -> bytes:
    return body[:100] + bytes([body[100] ^ 4]) + body[101:]


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda server, key: server.put(key, flipped(server.get(key))), BlockDamaged),
        (lambda server, key: server.put(key, server.get(key)[:-1]), DataTruncated),
        (lambda server, key: server.delete(key), DataTruncated),
    ],
)
def test_an_object_that_is_not_what_was_written_is_never_used(
    server: S3Server, tmp_path: Path, spoil: Callable[[S3Server, str], None], cause: type[Exception]
) -> None:
    with training(two(server, tmp_path, "spoilt"), tier_split="dir:1,store:1") as pair:
        train(pair, 0, 2)
        key = next(key for key in server.keys("spoilt") if key.endswith("/00001"))
        spoil(server, key)
        with pytest.raises(StateLost, match="on path store, is lost") as lost:
            train(pair, 2)
        assert isinstance(lost.value.__cause__, cause)
        assert f"s3://{BUCKET}/{key}" in str(lost.value)
        assert f"state of subgroup {int(key.split('/')[-2][:6])} after step 2" in str(lost.value)


def test_a_store_without_a_bound_has_no_figure_for_what_is_free(server: S3Server, tmp_path: Path) -> None:
    from tidegate.agent.telemetry.paths import PathSampler

    for bound, free in ((0, None), (8 * 45_056, 8 * 45_056 - 8 * 40_960)):
        with training(two(server, tmp_path, "figures", capacity_bytes=bound), tier_split="store:1") as pair:
            residences = pair.optimizer.engine.residences
            assert residences is not None
            watch = PathSampler(store_of(pair.optimizer), residences)
            train(pair, 0, 2)
            states = {sample.path: sample for sample in watch.sample()}
            assert states["store"].free_bytes == free
            assert states["dir"].free_bytes
            assert states["store"].written_bytes_per_day is None
            assert states["store"].bytes["write"] > 0


def test_a_store_with_a_bound_gets_no_more_than_that(server: S3Server, tmp_path: Path) -> None:
    paths = two(server, tmp_path, "share", capacity_bytes=3 * 45_056)
    with training(paths, tier_split="dir:1,store:3") as pair:
        train(pair, 0, 3)
        residence = pair.optimizer.engine.memory.residence
        assert (residence.count("dir"), residence.count("store")) == (5, 3)
        pair.assert_same_state()


def test_credentials_stay_out_of_what_is_said(
    server: S3Server, front: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="tidegate")
    said = []
    with training(two(front, tmp_path, "hush"), tier_split="store:1") as pair:
        train(pair, 0)
        front.answer = lambda asked: 403 if asked.method != "GET" else 500
        with pytest.raises(StateLost) as lost:
            train(pair, 1)
        said += [str(lost.value), repr(store_of(pair.optimizer).paths["store"].settings)]
    front.answer = lambda _: None
    assert "tidegate-lease" not in {thread.name for thread in threading.enumerate()}
    said += [server.get(key).decode(errors="replace") for key in server.keys("hush") if key.endswith("owner.json")]
    said.append(caplog.text)
    assert "cannot be deleted" in caplog.text
    assert not any(SECRET in one or "TIDEKEY" in one for one in said)


# ---- the end


ENDS = """
import sys, torch, tidegate
from tidegate.agent.tiers.object_settings import ObjectSettings
params = [torch.nn.Parameter(torch.zeros(20_000))]
paths = {"store": ObjectSettings(url=sys.argv[2], endpoint=sys.argv[1], block_bytes=16384)}
optimizer = tidegate.AdamW(params, offload=tidegate.Offload(paths=paths, host_cache=0, subgroup_numel=5000))
params[0].grad = torch.ones(20_000)
optimizer.step()
"""


@pytest.mark.slow
def test_objects_go_with_a_process_that_closes_nothing(server: S3Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, server.endpoint, f"s3://{BUCKET}/ends"],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert (done.returncode, len(said)) == (0, 1), done.stderr
    assert "the device is emulated" in said[0]
    assert server.keys("ends") == []
