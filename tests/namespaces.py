"""Network namespaces as hosts on one switch: own addresses, own loopback, a cable each that can be pulled."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Why this machine cannot do it; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "not installed: iproute2"
    probe = f"tide-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    done = _ip("-n", probe, "link", "add", "br0", "type", "bridge", check=False)
    _ip("netns", "del", probe)
    return f"no bridges here: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Host:
    """`address` is what the others reach it by. A process started here has this network and no other."""

    name: str
    space: str
    address: str
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter, initargs=(f"/run/netns/{self.space}",))

    def start(self, command: list[str], log: Path, **more: Any) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                **more,
            )

    def do(self, call: Callable[[], T]) -> T:
        """Calls it in a thread that is on this host: the connections it opens are this host's."""
        return self._thread.submit(call).result()


@dataclass
class Switch:
    space: str
    hosts: list[Host]

    def pull(self, host: Host) -> None:
        """The cable of the host. Addresses and open connections are as they were."""
        _ip("-n", self.space, "link", "set", host.name, "down")

    def plug(self, host: Host) -> None:
        _ip("-n", self.space, "link", "set", host.name, "up")


@contextlib.contextmanager
def switched(*names: str) -> Iterator[Switch]:
    """Hosts of these names, each with a cable to one switch."""
    switch = Switch(f"tide{os.getpid()}-switch", [])
    spaces = [f"tide{os.getpid()}-{name}" for name in names]
    try:
        _ip("netns", "add", switch.space)
        _ip("-n", switch.space, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch.space, "link", "set", "br0", "up")
        for number, (name, space) in enumerate(zip(names, spaces, strict=True), start=1):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", name, "netns", switch.space)
            _ip("-n", switch.space, "link", "set", name, "master", "br0", "up")
            _ip("-n", space, "address", "add", f"10.214.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            switch.hosts.append(Host(name, space, f"10.214.0.{number}"))
        yield switch
    finally:
        for host in switch.hosts:
            host._thread.shutdown()
        for space in (*spaces, switch.space):
            _ip("netns", "del", space, check=False)


def enter(network: str) -> None:
    """Moves this thread, and no other, to the network namespace that is this file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {network}")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)
