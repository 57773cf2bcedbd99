"""The scenario's machine: two loop file systems, a daemon, Prometheus, Alertmanager and a training run, all real.

To be used in namespaces of its own for mounts and processes, which end with the one that uses it: see `scenario`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agent.tiers.broken_file_systems import MEGABYTE, loop_file_system
from tests.services import ROOT, Alertmanager, Prometheus, alertmanager, daemon_process, prometheus, until
from tidegate.client.daemon_client import DaemonClient

RUN = "llama"
PATHS = ("nvme", "pfs")
TRAINING = (
    "--width 320 --layers 2 --link-bytes-per-second 1e10 --update-params-per-second 2e6 "
    "--stride 1 --subgroup-numel 25000 --host-cache 0 --wear-bytes-per-day 4000000000000"
)
"""With a limit on wear, so that the family that tells it is there."""
BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass
class Stand:
    base: Path
    daemon_url: str
    prometheus: Prometheus
    alertmanager: Alertmanager
    directories: dict[str, Path]
    training: subprocess.Popen[bytes] | None = None
    """The first one; a runbook starts another."""
    throttles: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def state_dir(self) -> Path:
        return self.base / "state"

    @property
    def port(self) -> str:
        return self.daemon_url.rpartition(":")[2]

    @property
    def env(self) -> dict[str, str]:
        """Of an operator's shell."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
        library = f"{ROOT}{os.pathsep}{kept.get('PYTHONPATH', '')}"
        return {**kept, "PATH": programs, "PYTHONPATH": library, "TIDEGATE_STATE_DIR": str(self.state_dir)}

    @property
    def training_command(self) -> str:
        paths = " ".join(f"--path {name}={directory}" for name, directory in self.directories.items())
        return (
            f"{sys.executable} -m tests.trainee --run {RUN} --daemon {self.daemon_url} {paths} "
            f"--tier-split {':1,'.join(PATHS)}:1 {TRAINING}"
        )

    def client(self) -> DaemonClient:
        return DaemonClient(self.daemon_url, (self.state_dir / "operate.token").read_text().strip())

    def start_training(self) -> None:
        with (self.base / "training.log").open("a") as log:
            command = self.training_command.split()
            self.training = subprocess.Popen(command, env=self.env, stdout=log, stderr=subprocess.STDOUT)

    def steps(self) -> int:
        with self.client() as client:
            return next((run.step for run in client.runs() if run.run == RUN), 0)

    def throttle(self, path: str, bytes_per_second: int) -> None:
        """The training run gets so much of a path's block device, each way, by a control group of its own."""
        assert self.training is not None
        number, pid = os.stat(self.directories[path]).st_dev, str(self.training.pid)
        group = BLKIO / f"tidegate-alerts-{uuid.uuid4().hex[:8]}"
        group.mkdir()
        self.throttles.callback(group.rmdir)
        for way in ("read", "write"):
            rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_second}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(rule)
        (group / "cgroup.procs").write_text(pid)
        self.throttles.callback((BLKIO / "cgroup.procs").write_text, pid)

    def daemon_pid(self) -> int:
        return int(json.loads((self.state_dir / "daemon.json").read_text())["pid"])

    def firing(self, alert: str, **labels: str) -> list[dict[str, Any]]:
        """What Prometheus has firing, of these labels."""
        found = self.prometheus.alerts(alert, "firing")
        return [a for a in found if all(a["labels"].get(name) == value for name, value in labels.items())]


@contextlib.contextmanager
def stand(base: Path) -> Iterator[Stand]:
    """Everything up and the run training. What is left running at the end goes with the namespace."""
    directories = {}
    for name in PATHS:
        directories[name] = loop_file_system(base / name, base / f"{name}.img", 64 * MEGABYTE)
    with (
        daemon_process(base / "state", "tests.alerts.hasty_daemon") as daemon,
        alertmanager(base / "alertmanager", daemon.port, base / "state" / "alert.token") as manager,
        prometheus(base / "prometheus", daemon.port, manager.url) as prom,
    ):
        made = Stand(base, daemon.url, prom, manager, directories)
        with made.throttles:
            made.start_training()
            until(lambda: made.steps() > 3, "steps", 60)
            yield made
