"""docker-compose.yml and the Dockerfile as data: what Docker would run, as whom, and with which files in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.services import ROOT

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
FOREIGN = {"prom/prometheus": "prometheus", "prom/alertmanager": "alertmanager", "grafana/grafana": "grafana"}
"""What the entry points of others' images run."""


@dataclass(frozen=True)
class Mount:
    """`source` is a path on the host, or the name of a volume."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True)
class Service:
    """One service of the compose file."""

    name: str
    raw: dict[str, Any]

    @property
    def image(self) -> str:
        return str(self.raw["image"])

    @property
    def argv(self) -> list[str]:
        """Entry point and command."""
        name = self.image.partition(":")[0]
        entry = [FOREIGN[name]] if name in FOREIGN else entrypoint()
        return [*entry, *self.raw["command"]]

    @property
    def user(self) -> tuple[int, int]:
        uid, _, gid = str(self.raw["user"]).partition(":")
        return int(uid), int(gid)

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.raw.get("environment", {}))

    @property
    def mounts(self) -> list[Mount]:
        found = [Mount(*_split(text)) for text in self.raw.get("volumes", ())]
        secrets = compose()["secrets"]
        for secret in self.raw.get("secrets", ()):
            source, target = (secret, secret) if isinstance(secret, str) else (secret["source"], secret["target"])
            found.append(Mount(secrets[source]["file"], f"/run/secrets/{target}", True))
        return found

    @property
    def published(self) -> list[tuple[str, int]]:
        """(address of the host, port inside)."""
        rows = [str(port).split(":") for port in self.raw.get("ports", ())]
        return [(address, int(inside)) for address, _outside, inside in rows]

    @property
    def waits_for(self) -> list[str]:
        return list(self.raw.get("depends_on", {}))

    @property
    def health(self) -> list[str]:
        kind, *command = self.raw["healthcheck"]["test"]
        assert kind == "CMD"
        return [str(word) for word in command]


def compose(**variables: str) -> dict[str, Any]:
    """The file, with variables, or what stands for them, in it."""
    text = _VARIABLE.sub(lambda found: variables.get(found.group(1), found.group(2)), COMPOSE.read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def services(**variables: str) -> dict[str, Service]:
    """By name, those that others wait for first; what a profile hides is left out."""
    found = {name: Service(name, raw) for name, raw in compose(**variables)["services"].items()}
    ordered: dict[str, Service] = {}

    def add(name: str) -> None:
        for earlier in found[name].waits_for:
            add(earlier)
        ordered.setdefault(name, found[name])

    for name, service in found.items():
        if "profiles" not in service.raw:
            add(name)
    return ordered


def entrypoint() -> list[str]:
    """That of our images."""
    found = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert len(found) == 1
    words: list[str] = json.loads(found[0])
    return words


def _split(text: str) -> tuple[str, str, bool]:
    source, target, *options = text.split(":")
    return source, target, options == ["ro"]


def on_host(source: str) -> Path | None:
    """The file or folder of the repository that is mounted; None for a named volume."""
    return (ROOT / source).resolve() if source.startswith(".") else None
