"""What a container engine would do with a service, done with the kernel's own means: no engine is needed, but root.

Each service is a process in a network namespace that bears its name, on a bridge with the others, and in a mount
namespace where the machine's files lie under an overlay: the folders, volumes and secrets of the compose file are at
their places, it runs as the compose file's user, without capabilities, and read-only where the file says so.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.deployment.compose import Service, on_host
from tests.services import ROOT, until

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "chroot", "mount", "wget", "prometheus")
DEBIAN = {"alertmanager": "prometheus-alertmanager"}
"""What Debian calls a program."""


def why_not() -> str | None:
    """Why this machine cannot do it; None where it can."""
    if os.geteuid() != 0:
        return "namespaces and mounts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if shutil.which("alertmanager") is None and shutil.which("prometheus-alertmanager") is None:
        missing.append("alertmanager")
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"tide-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    command = "d=$(mktemp -d) && mount -t tmpfs none $d && mkdir $d/u $d/w $d/m && " \
              "mount -t overlay overlay -o lowerdir=/,upperdir=$d/u,workdir=$d/w $d/m"  # fmt: skip
    done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return f"no overlay mounts here: {done.stderr.strip()}" if done.returncode else None


@dataclass
class Container:
    """A service that runs, or ran."""

    service: Service
    namespace: str
    folder: Path
    address: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another process in the container, as `docker exec` would have it."""
        assert self.process is not None
        uid, gid = self.service.user
        entered = ["nsenter", "--target", str(self.process.pid), "--net", "--mount", "--root"]
        user = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
        words = [*entered, *user, "env", "-i", *_assignments(self.service), *_as_here(list(command))]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)

    def healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.service.name} ended with {self.process.returncode}:\n{self.log}"
        return self.run(*self.service.health).returncode == 0


@dataclass
class Engine:
    """Starts services in their order and ends them."""

    folder: Path
    secrets: Path
    names: list[str]
    containers: dict[str, Container] = field(default_factory=dict)

    @property
    def bridge(self) -> str:
        return f"tide{os.getpid()}-bridge"

    def namespace(self, name: str) -> str:
        return f"tide{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        return f"10.213.0.{10 + self.names.index(name)}"

    def connect(self) -> None:
        """A bridge, and for each service a namespace whose `eth0` is plugged into it."""
        _ip("netns", "add", self.bridge)
        _inside(self.bridge, "link", "add", "br0", "type", "bridge")
        _inside(self.bridge, "link", "set", "br0", "up")
        for name in self.names:
            space = self.namespace(name)
            _ip("netns", "add", space)
            _inside(space, "link", "add", "eth0", "type", "veth", "peer", "name", name[:15], "netns", self.bridge)
            _inside(self.bridge, "link", "set", name[:15], "master", "br0", "up")
            _inside(space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _inside(space, "link", "set", device, "up")

    def start(self, service: Service) -> Container:
        folder = self.folder / service.name
        folder.mkdir()
        (folder / "script").write_text(self._script(service, folder))
        container = Container(service, self.namespace(service.name), folder, self.address(service.name))
        command = ["ip", "netns", "exec", container.namespace, "unshare", "--mount", "--uts", "sh", "-eu",
                   str(folder / "script")]  # fmt: skip
        with (folder / "log").open("wb") as log:
            container.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.containers[service.name] = container
        return container

    def _script(self, service: Service, folder: Path) -> str:
        """Shell: the container's files below `root`, then the service in place of the shell."""
        root, (uid, gid) = folder / "root", service.user
        for name in ("upper", "work", "root"):
            (folder / name).mkdir()
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        said = [
            f"hostname {service.raw.get('hostname', 'made-up-by-docker')}",
            f"mount -t overlay overlay -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work {root}",
            f"mount --rbind /proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"cp {folder}/hosts {root}/etc/hosts",
        ]
        for place in service.raw.get("tmpfs", ()):
            said += [f"mkdir -p {root}{place}", f"mount -t tmpfs -o mode=1777 tmpfs {root}{place}"]
        # Packages of the test's Python, where they are. Only the way to them is opened for others, in the overlay.
        for place in _installed():
            said += [f"mkdir -p {root}{place}", f"mount --bind {place} {root}{place}"]
            said += [f"mount -o remount,bind,ro {root}{place}"]
            said += [f"chmod o+x {root}{parent} 2>/dev/null || true" for parent in place.parents if parent != Path("/")]
        for mount in service.mounts:
            target = f"{root}{mount.target}"
            source = on_host(mount.source)
            if source is None:
                source = self.folder / "volumes" / mount.source
                source.mkdir(parents=True, exist_ok=True)
                os.chown(source, uid, gid)
            elif mount.source.startswith("./deploy/secrets/"):
                source = self.secrets / source.name
            made = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p $(dirname {target}) && touch {target}"
            said += [made, f"mount --bind {source} {target}"]
            if mount.read_only:
                said.append(f"mount -o remount,bind,ro {target}")
        directory = service.raw.get("working_dir", "/")
        if service.raw.get("read_only"):
            said.append(f"mount -o remount,ro {root}")
        argv = shlex.join(_as_here(service.argv))
        environment = shlex.join(_assignments(service))
        said += [
            f"exec chroot {root} setpriv --reuid={uid} --regid={gid} --clear-groups --no-new-privs --bounding-set=-all "
            f"--inh-caps=-all env -i --chdir={directory} {environment} {argv}",
        ]
        return "\n".join(said) + "\n"

    def stop(self) -> None:
        for container in reversed(self.containers.values()):
            if container.process is not None and container.process.poll() is None:
                container.process.terminate()
                try:
                    container.process.wait(20)
                except subprocess.TimeoutExpired:
                    container.process.kill()
                    container.process.wait()
        for space in (*map(self.namespace, self.names), self.bridge):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextlib.contextmanager
def engine(folder: Path, secrets: Path, chosen: dict[str, Service]) -> Iterator[Engine]:
    """All of `chosen` started, each when those that it waits for are healthy; those that stay are healthy."""
    made = Engine(folder, secrets, list(chosen))
    try:
        made.connect()
        for service in chosen.values():
            for name in service.waits_for:
                until(made.containers[name].healthy, f"{name} healthy", 90)
            made.start(service)
        for name, service in chosen.items():
            if service.raw["restart"] != "no":  # that one may be done by now
                until(made.containers[name].healthy, f"{name} healthy", 90)
        yield made
    finally:
        made.stop()


def _installed() -> list[Path]:
    """Folders that the test's Python and the repository are made of, outermost only."""
    candidates = {Path(sys.prefix), Path(sys.base_prefix), ROOT, *(Path(p) for p in sys.path if Path(p).is_dir())}
    places = sorted({place.resolve() for place in candidates} - {Path("/usr")})
    return [p for p in places if not any(p.is_relative_to(other) for other in (*places, Path("/usr")) if other != p)]


def _assignments(service: Service) -> list[str]:
    """The image's environment and the service's, with this machine's place for programs."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **service.environment}
    return [f"{name}={value}" for name, value in environment.items()]


def _as_here(argv: list[str]) -> list[str]:
    """The same command where Debian has another name for the program."""
    name = DEBIAN.get(argv[0], argv[0])
    return [name if shutil.which(name) else argv[0], *argv[1:]]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def _inside(space: str, *words: str) -> None:
    _ip("-n", space, *words)
