"""examples/slurm.sbatch: under a stand-in for srun, and as a job of a real Slurm with two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import ROOT, free_port, until
from tidegate.client.daemon_client import DaemonClient
from tidegate.wire.run import RankView

BATCH = ROOT / "examples" / "slurm.sbatch"
OPTIONS = ("--iters=60", "--eval-interval=30")
SRUN = r"""#!/usr/bin/env bash
# What srun does with --ntasks-per-node=1: one process on each node, all ended when one fails.
set -u
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=$SLURM_NNODES "$@" &
done
for node in $(jobs -p); do
  wait "$node" || { kill $(jobs -p); exit 1; }
done
"""
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TIDEGATE_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "BIN": str(Path(sys.executable).parent), **more}


def test_the_batch_file_is_sound() -> None:
    subprocess.run(["bash", "-n", BATCH], check=True)
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", BATCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def watch(job: subprocess.Popen[bytes], log: Path, out: Path) -> None:
    """The job trains on all ranks of both nodes, its daemon shows them, and it ends well and leaves no daemon."""

    def said(pattern: str) -> str:
        assert job.poll() is None, f"it ended with {job.returncode}: {log.read_text()}"
        found = re.search(pattern, log.read_text()) if log.exists() else None
        return found[1] if found else ""

    address = until(lambda: said(r"TIDEGATE_DAEMON=(\S+)"), "the job's daemon", 60)
    token = until(lambda: said(r"TIDEGATE_TOKEN_DIR=(\S+)"), "the job's tokens")
    assert Path(token) == out / "tokens"
    assert (out / "tokens").stat().st_mode & 0o777 == 0o700
    with DaemonClient(address, (out / "tokens" / "read.token").read_text().strip()) as client:

        def present() -> list[RankView]:
            assert job.poll() is None, log.read_text()
            ranks = [rank for run in client.runs() for rank in run.ranks]
            return ranks if len(ranks) == 4 else []

        ranks = until(present, "four ranks", 60)
    assert sorted(rank.rank for rank in ranks) == [0, 1, 2, 3]
    assert {rank.metrics_address.partition(":")[0] for rank in ranks} == {socket.gethostname()}
    assert job.wait(200) == 0, log.read_text()
    assert "step 60: train loss" in log.read_text()
    assert (out / "ckpt.pt").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((socket.gethostname(), int(address.rpartition(":")[2])), 5).close()


@pytest.mark.slow
def test_it_trains_under_a_stand_in_for_srun(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    given = environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}", OUT=str(tmp_path / "out"), TMPDIR=str(tmp_path),
        SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NAME="nanogpt", SLURM_JOB_ID=str(free_port() - 20_000),
        SLURM_NNODES="2", SLURM_GPUS_ON_NODE="2",
    )  # fmt: skip
    with (tmp_path / "first").open("wb") as stream:
        first = subprocess.Popen(
            ["bash", BATCH, *OPTIONS], env=given, stdout=stream, stderr=stream, start_new_session=True
        )
    until(lambda: (tmp_path / "out" / "ckpt.pt").exists() or first.poll() is not None, "half of the training", 90)
    os.killpg(first.pid, signal.SIGTERM)  # as before a requeue
    first.wait(60)
    assert "step 30: " in (tmp_path / "first").read_text(), (tmp_path / "first").read_text()
    with (tmp_path / "log").open("wb") as stream:
        second = subprocess.Popen(["bash", BATCH, *OPTIONS], env=given, stdout=stream, stderr=stream)
    watch(second, tmp_path / "log", tmp_path / "out")
    assert "iter 10: " not in (tmp_path / "log").read_text(), "it has begun anew"
    assert not list(tmp_path.glob("tmp.*")), "the daemon's state has gone with it"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """A real Slurm of two nodes with two GPUs each, all on this machine; the GPUs are files. Gives its slurm.conf."""
    host, controller, *ports = socket.gethostname(), free_port(), free_port(), free_port()
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=1000 Gres=gpu:2"
        for name, port in zip(("one", "two"), ports, strict=True)
    ]
    for name in ("state", "spool/one", "spool/two"):
        (folder / name).mkdir(parents=True)
    (folder / "gres.conf").write_text("NodeName=one,two Name=gpu File=/dev/null,/dev/zero\n")
    (folder / "cgroup.conf").touch()
    (folder / "slurm.conf").write_text("\n".join([
        f"ClusterName=private\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={controller}",
        "SlurmUser=root\nSlurmdUser=root\nAuthType=auth/none\nCredType=cred/none",
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/controller.pid\nSlurmdPidFile={folder}/%n.pid",
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nReturnToService=2",
        "SchedulerType=sched/builtin\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nGresTypes=gpu",
        "SlurmdParameters=config_overrides",
        *nodes,
        "PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP\n",
    ]))  # fmt: skip
    config = folder / "slurm.conf"
    daemons = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"], ["slurmd", "-D", "-N", "two"]]
    processes = []
    try:
        for number, command in enumerate(daemons):
            with (folder / f"daemon-{number}.log").open("wb") as log:
                processes.append(subprocess.Popen([*command, "-f", config], stdout=log, stderr=log))

        def idle() -> bool:
            told = ["sinfo", "--noheader", "--Node", "--format=%N %t"]
            done = subprocess.run(
                told, env=environment(SLURM_CONF=str(config)), capture_output=True, text=True, check=False
            )
            return done.stdout.split("\n")[:2] == ["one idle", "two idle"]

        until(idle, "two idle nodes", 60)
        yield config
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


@pytest.mark.torture
def test_a_real_slurm_runs_it_on_two_nodes(tmp_path: Path) -> None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client)")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    with cluster(tmp_path / "slurm") as config:
        log = tmp_path / "log"
        given = environment(SLURM_CONF=str(config), OUT=str(tmp_path / "out"))
        less = ["--gpus-per-node=2", "--cpus-per-task=2", f"--output={log}"]
        job = subprocess.Popen(["sbatch", "--wait", *less, BATCH, *OPTIONS], cwd=ROOT, env=given)
        watch(job, log, tmp_path / "out")
