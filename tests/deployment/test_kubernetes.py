"""examples/kubernetes_job.yaml: against the schemas of Kubernetes, and its containers' commands as processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.services import ROOT, free_port, until
from tidegate.client.daemon_client import DaemonClient

DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes_job.yaml").read_text()))
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def document(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in DOCUMENTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(kind: str, name: str) -> dict[str, Any]:
    template: dict[str, Any] = document(kind, name)["spec"]["template"]
    return template


DAEMON, JOB = pod("Deployment", "tidegate-daemon"), pod("Job", "nanogpt")


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    for one in DOCUMENTS:
        kubernetes_validate.validate(one, version, strict=True)


def test_names_lead_from_one_to_the_other() -> None:
    service, job = document("Service", "tidegate-daemon"), document("Job", "nanogpt")
    assert service["spec"]["selector"].items() <= DAEMON["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["name"] == "http", "as deploy/kubernetes/prometheus-scrape.yml asks"
    assert JOB["spec"]["subdomain"] == document("Service", "nanogpt")["metadata"]["name"]
    (trainer,) = JOB["spec"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    assert given["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{JOB['spec']['subdomain']}"
    assert "--daemon=http://tidegate-daemon:8790" in trainer["args"]
    assert f"--port={trainer['ports'][0]['containerPort']}" in trainer["args"]
    assert trainer["ports"][0]["name"] == "metrics"
    for template in (DAEMON, JOB):
        spec = template["spec"]
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == {
            v["name"] for v in spec["volumes"]
        }
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert document("PersistentVolumeClaim", claim["claimName"])
            if secret := volume.get("secret"):
                assert secret["secretName"] == "tidegate-tokens"


def mounted(folder: Path, names: tuple[str, ...], secrets: Path) -> Path:
    """A volume of a secret, as the kubelet makes one: files are links through a link to the present version."""
    (folder / "..2026_01_01").mkdir(parents=True)
    (folder / "..data").symlink_to("..2026_01_01")
    for name in names:
        shutil.copyfile(secrets / name, folder / "..data" / name)
        (folder / name).symlink_to(f"..data/{name}")
    return folder


def here(words: list[str], places: dict[str, str]) -> list[str]:
    """A container's command with paths, addresses and variables as they are on this machine."""
    for there, place in places.items():
        words = [word.replace(there, place) for word in words]
    return words


def start(words: list[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    with log.open("wb") as stream:
        return subprocess.Popen([sys.executable, *words], env=environment, stdout=stream, stderr=stream)


def answers(process: subprocess.Popen[bytes], url: str, log: Path) -> Callable[[], str]:
    def ask() -> str:
        assert process.poll() is None, log.read_text()
        try:
            answer = httpx.get(url, timeout=5)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.is_success else ""

    return ask


@pytest.mark.slow
def test_the_commands_of_the_containers_train_together(tmp_path: Path) -> None:
    """Addresses of pods are of the loopback network; names that the cluster's DNS knows are replaced."""
    secrets, port, meet, metrics = tmp_path / "secrets", free_port(), free_port(), free_port()
    subprocess.run([ROOT / "deploy" / "make-secrets", secrets], check=True, capture_output=True)
    scopes = tuple(f"{scope}.token" for scope in ("read", "operate", "agent", "alert"))
    (daemon,), (trainer,) = DAEMON["spec"]["containers"], JOB["spec"]["containers"]
    places = {
        "8790": str(port), "/var/lib/tidegate": str(tmp_path / "state"), "0.0.0.0": "127.0.0.1",
        "/run/secrets/tidegate": str(mounted(tmp_path / "tokens", scopes, secrets)),
    }  # fmt: skip
    processes = [start(["-m", "tidegate", *here(daemon["args"], places)], tmp_path / "daemon.log")]
    url = f"http://127.0.0.1:{port}"
    try:
        until(
            answers(processes[0], f"{url}{daemon['readinessProbe']['httpGet']['path']}", tmp_path / "daemon.log"), "it"
        )
        (items,) = (volume["secret"]["items"] for volume in JOB["spec"]["volumes"] if volume["name"] == "tokens")
        agent = mounted(tmp_path / "agent", tuple(item["path"] for item in items), secrets)
        fixed = {"/data": str(tmp_path), "/script": str(ROOT / "examples"), "--iters=1000": "--iters=60",
                 "http://tidegate-daemon:8790": url, "=9464": f"={metrics}"}  # fmt: skip
        addresses = [f"127.0.0.{rank + 1}" for rank in range(2)]
        for rank, address in enumerate(addresses):
            names = {"nanogpt-0.nanogpt": addresses[0], "29500": str(meet), "/run/secrets/tidegate": str(agent)}
            found = {"RANK": str(rank), "POD_IP": address}  # of the downward API
            given = {
                variable["name"]: found[variable["name"]] if "valueFrom" in variable
                else here([variable["value"]], names)[0]
                for variable in trainer["env"]
            }  # fmt: skip
            words = here(trainer["command"][1:] + trainer["args"], {**fixed, "$(POD_IP)": address})
            processes.append(start(words, tmp_path / f"{rank}.log", **given))
        for rank, address in enumerate(addresses):
            ask = answers(processes[1 + rank], f"http://{address}:{metrics}/metrics", tmp_path / f"{rank}.log")
            assert "tidegate_phase_seconds" in until(ask, "metrics of the pod", 60)
        with DaemonClient(url, (secrets / "read.token").read_text()) as client:
            wanted = {f"{address}:{metrics}" for address in addresses}
            until(lambda: wanted == {r.metrics_address for run in client.runs() for r in run.ranks}, "both ranks", 60)
        for rank in range(2):
            assert processes[1 + rank].wait(200) == 0, (tmp_path / f"{rank}.log").read_text()
        assert "step 60: train loss" in (tmp_path / "0.log").read_text()
        assert (tmp_path / "nanogpt" / "ckpt.pt").exists()
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(60)
