"""Images, made, and the services of docker-compose.yml but Grafana, started by a Docker of the tests' own."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.deployment import images
from tests.deployment.docker import GATEWAY, Docker, docker
from tests.deployment.downloads import Downloads, served
from tests.services import ROOT, Prometheus
from tidegate.client.daemon_client import DaemonClient

STAY = ("daemon", "dashboard", "prometheus", "alertmanager")
MANY_STEPS = "100000"


@dataclass
class Stack:
    """What runs: `compose` is called where a user would call it, in a copy of the repository."""

    docker: Docker
    project: Path
    downloads: Downloads
    say: Callable[[str], None]

    def shell(self, script: str, steps: str = MANY_STEPS, seconds: float = 300) -> str:
        """What bash prints, in the folder of the compose file; it has to succeed."""
        environment = {**self.docker.environment, "TIDEGATE_STEPS": steps}
        done = subprocess.run(
            ["bash", "-euc", script], cwd=self.project, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def compose(self, *words: str, steps: str = MANY_STEPS) -> str:
        return self.shell(shlex.join(["docker-compose", *words]), steps)

    def container(self, service: str) -> str:
        """The one that compose has made of it."""
        label = f"label=com.docker.compose.service={service}"
        return self.docker("ps", "--all", "--quiet", "--no-trunc", "--filter", label).strip()

    def state(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = self.docker.inspect(self.container(service))["State"]
        return found

    def healthy(self, service: str) -> bool:
        state = self.state(service)
        return bool(state["Status"] == "running" and state["Health"]["Status"] == "healthy")

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        return self.docker.run("exec", self.container(service), *command)

    def get(self, url: str) -> httpx.Response:
        """As a program on the machine would get it from a published port."""
        return self.docker.do(httpx.get, url, timeout=20.0, trust_env=False)

    def ask(self, call: Callable[[DaemonClient], Any]) -> Any:
        """With the token that turns knobs."""
        token = (self.project / "deploy/secrets/operate.token").read_text()

        def asked() -> Any:
            with DaemonClient("http://127.0.0.1:8790", token, timeout=20.0) as client:
                return call(client)

        return self.docker.do(asked)

    def prometheus(self, what: Callable[[Prometheus], Any]) -> Any:
        return self.docker.do(what, Prometheus("http://127.0.0.1:9090"))

    def up(self, *services: str, steps: str = MANY_STEPS) -> None:
        """`docker-compose up` of these, and of what they wait for unless it runs; images are there."""
        self.compose("up", "--detach", "--no-build", *services, steps=steps)


@contextlib.contextmanager
def running(say: Callable[[str], None]) -> Iterator[Stack]:
    """All images, made, and all services, started."""
    with contextlib.ExitStack() as ends:
        engine = ends.enter_context(docker())
        ends.callback(say, "Docker's daemon ends, with all that it has")
        downloads = ends.enter_context(served(engine.listen(), GATEWAY))
        say("a base image, from Debian's packages")
        images.make_base(engine, downloads)
        project = images.project(engine.folder / "project")
        for target in ("control", "trainer"):
            say(f"image tidegate-{target}")
            images.build(engine, project, downloads, target)
        say("images of Prometheus and Alertmanager")
        images.build_others(engine, downloads)
        stack = Stack(engine, project, downloads, say)
        say("docker-compose up")
        stack.up(*STAY, "trainer")
        yield stack


def documented(page: str, *beginnings: str) -> list[str]:
    """Lines of a page, commands among them, that begin with these: one for each."""
    lines = [line.strip() for line in (ROOT / "docs" / page).read_text().splitlines()]
    found = {one: [line for line in lines if line.startswith(one)] for one in beginnings}
    assert all(len(rows) == 1 for rows in found.values()), found
    return [rows[0] for rows in found.values()]
