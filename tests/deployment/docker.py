"""A Docker of the tests' own: its daemon in namespaces of its own, so that it meets nothing of the machine's.

Network, bridges, rules of the firewall, mounts and processes are in the namespaces and go with them. Its files and its
control groups are removed by the shell that holds the namespaces, also where the tests were killed: the shell waits for
the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.namespaces import enter
from tests.services import until

T = TypeVar("T")
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap",
            "iptables": "iptables", "unshare": "util-linux"}  # fmt: skip
"""Debian's, by a program of each."""
CLIENT = "/usr/bin/docker"
"""Debian's, which is as old as its daemon."""

GATEWAY = "10.215.0.1"
"""What containers of the default network, and builds, know the daemon's own network by."""

HOLD = r"""
exec 2>>"$1/log"
set -u
group=tidegate-$$
if [ ! -e /sys/fs/cgroup/cgroup.controllers ] && [ ! -d /sys/fs/cgroup/memory ]; then
  mount -t tmpfs tmpfs /sys/fs/cgroup
  for one in $(awk '!/^#/ && $4 == 1 { print $1 }' /proc/cgroups); do
    mkdir "/sys/fs/cgroup/$one"
    mount -t cgroup -o "$one" cgroup "/sys/fs/cgroup/$one" || rmdir "/sys/fs/cgroup/$one"
  done
fi
if [ ! -e /sys/fs/cgroup/cgroup.controllers ] && [ ! -d /sys/fs/cgroup/systemd ]; then
  mkdir /sys/fs/cgroup/systemd
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
fi
mount -t tmpfs tmpfs /run
ip link set lo up
unshare --mount --pid --ipc --uts --fork --kill-child --mount-proc \
  docker-init -s -- dockerd --data-root="$1/data" --exec-root=/run/docker --pidfile=/run/docker.pid \
  --host="unix://$1/socket" --exec-opt=native.cgroupdriver=cgroupfs --cgroup-parent="/$group" --bip=@GATEWAY@/24 \
  >>"$1/log" 2>&1 </dev/null &
read -r _ || true
kill -KILL $!
wait
for again in 1 2 3 4 5 6 7 8 9 10; do
  find /sys/fs/cgroup -depth -type d -path "*/$group*" -exec rmdir {} + 2>/dev/null
  [ -z "$(find /sys/fs/cgroup -type d -name "$group")" ] && break
  sleep 1
done
cd / && rm -rf --one-file-system "$1"
""".replace("@GATEWAY@", GATEWAY)
"""Shell, in a mount and a network namespace of its own; `$1` is the folder of the daemon."""


def why_not() -> str | None:
    """Why this machine cannot do it; None where it can."""
    if platform.system() != "Linux":
        return "containers need Linux"
    if os.geteuid() != 0:
        return "a container engine needs root"
    missing = sorted({package for tool, package in PACKAGES.items() if shutil.which(tool) is None})
    if missing or not Path(CLIENT).exists():
        return f"not installed: {', '.join(missing or ['docker.io'])}"
    done = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    return f"no namespaces here: {done.stderr.decode().strip()}" if done.returncode else None


@dataclass
class Docker:
    """Its daemon runs. `do` calls something in the network in which the daemon publishes ports."""

    folder: Path
    holder: subprocess.Popen[bytes]
    _inside: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._inside = ThreadPoolExecutor(8, initializer=enter, initargs=(f"/proc/{self.holder.pid}/ns/net",))

    def do(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        return self._inside.submit(call, *args, **named).result()

    def listen(self) -> socket.socket:
        """A socket that all containers of the default network, and builds, can reach at GATEWAY."""
        return self.do(socket.create_server, ("0.0.0.0", 0), backlog=64)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "COMPOSE_"))}
        return {**kept, "DOCKER_HOST": f"unix://{self.folder}/socket", "DOCKER_BUILDKIT": "1",
                "COMPOSE_DOCKER_CLI_BUILD": "1", "COMPOSE_PROJECT_NAME": "tidegate",
                "BUILDKIT_PROGRESS": "plain"}  # fmt: skip

    def run(self, *words: str, seconds: float = 120, **more: Any) -> subprocess.CompletedProcess[str]:
        """`docker …`; the caller looks at how it ended."""
        return subprocess.run(
            [CLIENT, *words], env=self.environment, capture_output=True, text=True, timeout=seconds, check=False, **more
        )

    def __call__(self, *words: str, seconds: float = 120, **more: Any) -> str:
        """What `docker …` prints; it has to succeed."""
        done = self.run(*words, seconds=seconds, **more)
        assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("inspect", name))[0]
        return found


@contextlib.contextmanager
def docker() -> Iterator[Docker]:
    """A daemon that answers; with all that it made it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-docker-"))
    command = ["unshare", "--mount", "--net", "sh", "-c", HOLD, "sh", str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    made: Docker | None = None
    try:
        try:
            until(lambda: holder.poll() is not None or (folder / "socket").exists(), "Docker's socket", 30)
            made = Docker(folder, holder)
            until(lambda: made.run("version").returncode == 0, "Docker's daemon", 30)
        except AssertionError as error:
            error.add_note((folder / "log").read_text()[-4000:])
            raise
        yield made
    finally:
        if made is not None:
            made._inside.shutdown(wait=False)
        holder.communicate(b"end\n", timeout=600)
