"""What launchers say of a host's ranks: ports that do not collide, cores that are shared."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import tidegate
from tidegate.agent.ranks import (
    Ranks,
    _device_of_collectives,
    cpu_lane_threads,
    local_rank,
    ranks_of_host,
    ranks_that_share_host,
)
from tidegate.errors import ConfigError

LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")

LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK")


def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)


def test_each_launcher_says_how_many_ranks_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_launcher(monkeypatch)
    assert ranks_of_host() == 1
    for ranks, name in enumerate(reversed(LAUNCHERS), start=2):  # each counts before those that came before it
        monkeypatch.setenv(name, str(ranks))
        assert ranks_of_host() == ranks
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert ranks_of_host() == 1


def test_a_number_of_ranks_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_launcher(monkeypatch)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8(x2),4")  # slurm's way to say that hosts differ
    assert ranks_of_host() == 1
    monkeypatch.setenv("LOCAL_SIZE", "four")
    with pytest.raises(ConfigError, match="LOCAL_SIZE is 'four', a whole number is needed"):
        ranks_of_host()


@pytest.mark.parametrize(
    ("tasks", "node", "ranks"),
    [
        ("4(x2)", None, 4),
        ("4(x2)", "1", 4),
        ("4,4(x2)", None, 4),
        ("2(x3),1", "0", 2),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("1,8(x2),3", "0", 1),
        ("1,8(x2),3", "1", 8),
        ("1,8(x2),3", "2", 8),
        ("1,8(x2),3", "3", 3),
        ("1,8(x2),3", "4", 1),  # a node that the list does not have
        ("8(x2),3", "first", 1),
        ("8(x2),three", "0", 1),
        ("8(x)", "0", 1),
        ("0(x2),8", "0", 1),
    ],
)
def test_slurms_list_of_tasks_is_read_for_this_node(
    tasks: str, node: str | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_launcher(monkeypatch)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", tasks)
    if node is not None:
        monkeypatch.setenv("SLURM_NODEID", node)
    assert ranks_of_host() == ranks


def test_ranks_started_by_deepspeed_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _no_launcher(monkeypatch)
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.setattr(Ranks, "current", lambda: Ranks(0, 8))
    assert ranks_that_share_host() == 4


@pytest.mark.parametrize(
    ("bound", "cores", "ranks", "threads"),
    [(8, 8, None, 7), (8, 8, "1", 7), (8, 8, "4", 4), (8, 8, "16", 1), (1, 8, None, 1), (4, 8, "2", 3)],
    ids=["no launcher", "one rank", "four", "more than cores", "bound to one", "bound to some"],
)
def test_each_training_thread_has_a_core_left(
    bound: int, cores: int, ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)))
    _no_launcher(monkeypatch)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cpu_lane_threads() == threads


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_the_second_rank_of_a_host_takes_the_next_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    # Below those that connections are given: another test's must not take the second one meanwhile.
    few = random.Random(os.getpid()).sample(range(20_000, 30_000), 100)
    port = next(found for found in few if is_free(found) and is_free(found + 1))
    model = torch.nn.Linear(4, 4)
    with tidegate.AdamW(model.parameters()) as adam:
        assert tidegate.attach(adam, model, run="r", metrics_port=port).metrics_address == f"127.0.0.1:{port + 1}"


def test_each_launcher_says_which_rank_of_the_host_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    assert local_rank() == 0
    for rank, name in enumerate(LOCAL_RANKS, start=1):  # each counts before those that came before it
        monkeypatch.setenv(name, str(rank))
        assert local_rank() == rank


def test_a_port_above_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with (
        tidegate.AdamW(torch.nn.Linear(4, 4).parameters()) as adam,
        pytest.raises(ConfigError, match=r"metrics_port=65533 and rank 3 of this host make port 65536"),
    ):
        tidegate.attach(adam, run="r", metrics_port=65_533)


@pytest.mark.slow
def test_one_rank_that_cannot_attach_keeps_no_other_waiting(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_attach_in_vain, (tmp_path,), nprocs=2)  # type: ignore[attr-defined]
    mine, others = ((tmp_path / f"rank-{rank}").read_text() for rank in (1, 0))
    assert "make port 65536" in mine
    assert "Another rank could not attach" in others


def _attach_in_vain(rank: int, folder: Path) -> None:
    """One of two ranks; the second has no port. Both end, and attach together once it has one."""
    os.environ["LOCAL_RANK"] = str(rank)
    waits = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", waits, 2, rank)
    model = torch.nn.Linear(4, 4)
    with tidegate.AdamW(model.parameters()) as adam:
        with pytest.raises(ConfigError) as error:
            tidegate.attach(adam, model, run="r", metrics_port=65_535 * rank)
        (folder / f"rank-{rank}").write_text(str(error.value))
        assert adam.attachment is None
        tidegate.attach(adam, model, run="r")
    torch.distributed.destroy_process_group()


def test_a_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'first', a whole number is needed"):
        local_rank()


@pytest.mark.parametrize(
    ("config", "device"),
    [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl,cpu:gloo", "cpu"), ("cpu:gloo", "cpu")],
)
def test_collectives_use_a_device_that_the_process_group_has(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    assert _device_of_collectives() == device


def test_a_process_group_without_the_name_of_a_backend() -> None:
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert torch.distributed.get_backend() == "undefined"
        assert _device_of_collectives() == ("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[Callable[[], None]]:
    """Makes a process group in which the other rank is not there: collectives do nothing."""
    yield lambda: torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.distributed.destroy_process_group()


def step_of(model: torch.nn.Module, optimizer: tidegate.AdamW) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_an_optimizer_that_was_built_before_the_process_group_says_so_once(
    two_ranks: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    with tidegate.AdamW(model.parameters()) as optimizer:
        two_ranks()
        step_of(model, optimizer)
        step_of(model, optimizer)
    (said,) = (record.getMessage() for record in caplog.records if getattr(record, "event", "") == "built_before_ranks")
    assert "built before torch.distributed.init_process_group, for 1 rank, and now there are 2 ranks" in said
    assert said.endswith("Build the optimizer after init_process_group.")


def test_with_storage_paths_it_is_refused_before_a_weight_changes(
    two_ranks: Callable[[], None], tmp_path: Path
) -> None:
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    with tidegate.AdamW(model.parameters(), offload=tidegate.Offload(paths={"nvme": tmp_path})) as optimizer:
        two_ranks()
        for _ in range(2):
            with pytest.raises(ConfigError, match="Build the optimizer after init_process_group"):
                step_of(model, optimizer)
        assert torch.equal(model.weight, before)
        assert optimizer.num_steps == 0
    with tidegate.AdamW(model.parameters(), offload=tidegate.Offload(paths={"nvme": tmp_path})) as optimizer:
        step_of(model, optimizer)
