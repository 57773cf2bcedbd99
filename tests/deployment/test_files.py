"""What is deployed, as files: valid, hardened, and in agreement with each other."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.deployment.compose import COMPOSE, DOCKERFILE, Service, compose, on_host
from tests.services import ROOT, Prometheus, free_port, program, until
from tidegate.client.state_files import home_of

DEPLOY = ROOT / "deploy"
PROVISIONING = ROOT / "grafana" / "provisioning"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OURS = ("tidegate-control", "tidegate-trainer")
ALL = [Service(name, raw) for name, raw in compose()["services"].items()]
EACH = pytest.mark.parametrize("service", ALL, ids=lambda service: service.name)


def done(*command: str | Path) -> str:
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


# ---- docker-compose.yml


def test_the_compose_file_is_what_the_specification_allows(tmp_path: Path) -> None:
    check = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec")
    done(*check, COMPOSE)
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE.read_text().replace("read_only: true", "readonly: true"))
    with pytest.raises(AssertionError, match="readonly"):
        done(*check, wrong)


@EACH
def test_a_service_may_do_no_more_than_it_must(service: Service) -> None:
    raw = service.raw
    assert service.user[0] > 0
    assert raw["read_only"] is True
    assert raw["cap_drop"] == ["ALL"]
    assert raw["security_opt"] == ["no-new-privileges:true"]
    assert all(address == "127.0.0.1" for address, _ in service.published)
    assert raw["healthcheck"]["test"][0] == "CMD"
    assert not {"privileged", "network_mode", "pid"} & set(raw)


@EACH
def test_an_image_has_a_version(service: Service) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service.image)


def test_our_images_are_built_from_stages_that_there_are() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE))
    built = {
        service.image.partition(":")[0]: service.raw["build"]["target"] for service in ALL if "build" in service.raw
    }
    assert set(built) == set(OURS)
    assert set(built.values()) <= stages


@EACH
def test_secrets_come_as_files(service: Service) -> None:
    for name, value in service.environment.items():
        assert not re.search("token|password|secret", name, flags=re.IGNORECASE) or value.startswith("/run/secrets")


@EACH
def test_what_is_mounted_is_there_and_volumes_are_declared(service: Service) -> None:
    declared = compose()
    for mount in service.mounts:
        source = on_host(mount.source)
        if source is None:
            assert mount.source in declared["volumes"]
        elif not source.is_relative_to(DEPLOY / "secrets"):
            assert source.exists(), mount
            assert mount.read_only


def test_a_gpu_run_needs_its_profile() -> None:
    gpu = next(service for service in ALL if service.name == "trainer-gpu")
    assert gpu.raw["profiles"] == ["gpu"]
    assert "--emulated" not in gpu.raw["command"]
    trainer = next(service for service in ALL if service.name == "trainer")
    others = [w.replace("trainer-gpu", "trainer").replace("demo-gpu", "demo") for w in gpu.raw["command"]]
    assert others == [word for word in trainer.raw["command"] if word != "--emulated"]
    (device,) = gpu.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize(
    ("service", "tokens"),
    [("daemon", {"read", "operate", "agent", "alert"}), ("dashboard", {"read"}), ("trainer", {"agent"})],
)
def test_a_service_has_the_tokens_that_it_needs(service: str, tokens: set[str]) -> None:
    [found] = [one for one in ALL if one.name == service]
    mounted = {Path(mount.source).stem for mount in found.mounts if mount.target.startswith("/run/secrets/")}
    assert mounted == tokens


def test_secrets_are_made_once_in_a_folder_that_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    done(DEPLOY / "make-secrets", folder)
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert {Path(secret["file"]).name for secret in compose()["secrets"].values()} == set(first)
    assert all(len(text) >= 40 and text == text.strip() for text in first.values())
    assert len(set(first.values())) == len(first)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    done(DEPLOY / "make-secrets", folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


# ---- what Prometheus and Grafana are given


@pytest.mark.parametrize("name", ["prometheus.yml", "alertmanager.yml"])
def test_what_compose_mounts_differs_only_in_addresses_and_secrets(name: str) -> None:
    here = yaml.safe_load((ROOT / "grafana" / "prometheus" / name).read_text())
    there = (DEPLOY / "compose" / name).read_text()
    for service, port in (("daemon", 8790), ("alertmanager", 9093)):
        there = there.replace(f"{service}:{port}", f"127.0.0.1:{port}")
    assert yaml.safe_load(there.replace("/run/secrets/alert.token", "alert.token")) == here


def test_grafana_finds_datasource_and_dashboards_where_they_are_mounted() -> None:
    grafana = next(service for service in ALL if service.name == "grafana")
    targets = {mount.target: on_host(mount.source) for mount in grafana.mounts}
    assert targets["/etc/grafana/provisioning"] == PROVISIONING
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "tidegate.yml").read_text())["providers"]
    assert targets[provider["options"]["path"]] == ROOT / "grafana" / "dashboards" / "json"
    text = (PROVISIONING / "datasources" / "prometheus.yml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", text)) <= set(grafana.environment)
    (source,) = yaml.safe_load(text)["datasources"]
    scraped = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]
    assert not (PROVISIONING / "alerting").exists(), "alerts are Prometheus's"


# ---- Dockerfile


def test_the_dockerfile_has_no_lint() -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if linter is None:
        pytest.skip("hadolint is not installed: its wheel is for x86-64 only")
    done(linter, DOCKERFILE)


def test_images_do_not_run_as_root_and_their_base_has_a_version() -> None:
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+$", text, flags=re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)) == {"${PYTHON_IMAGE}", "base", "packages"}
    for name in ("control", "trainer"):
        assert "useradd --uid 10001 " in image(name), "it begins with the base"
        users = re.findall(r"^USER (\S+)$", image(name), flags=re.MULTILINE)
        assert users == ["10001:10001"]


def image(name: str) -> str:
    """All that the Dockerfile says of an image, that of the stages below it first."""
    stages = {stage.split(" AS ")[1].split("\n")[0]: stage for stage in DOCKERFILE.read_text().split("\nFROM ")[1:]}
    below = stages[name].split(" AS ")[0]
    return (image(below) if below in stages else "") + stages[name]


def test_the_trainer_has_what_triton_needs_at_run_time() -> None:
    """A compiler, headers, and a folder of its user from which what was compiled can be loaded."""
    text = image("trainer")
    installed = re.findall(r"apt-get install .*--no-install-recommends (.*?) \\$", text, flags=re.MULTILINE)
    assert {"gcc", "libc6-dev"} <= set(" ".join(installed).split())
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", text)
    gpu = next(service for service in ALL if service.name == "trainer-gpu")
    (mount,) = [mount for mount in gpu.mounts if Path(cache).is_relative_to(mount.target)]
    assert not mount.read_only
    assert not any(Path(cache).is_relative_to(folder) for folder in gpu.raw["tmpfs"]), "Docker mounts it noexec"
    folders = re.search(r"install --directory --owner=10001 .*?((?:/\S+ ?)+)\n", text, flags=re.DOTALL)
    assert folders is not None
    assert mount.target in folders[1].split()


def test_the_build_gets_all_that_the_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    linked = {os.readlink(path).removeprefix("../") for path in (ROOT / "tidegate").iterdir() if path.is_symlink()}
    assert {"tidegate", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"} | linked <= allowed
    assert all((ROOT / name).exists() for name in allowed)


# ---- systemd and Kubernetes


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_a_unit_is_accepted_and_confined(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # Only the program's place is changed: it is not installed there.
    program_there = "/opt/tidegate/bin/tidegate"
    assert program_there in unit.read_text()
    for other in UNITS:
        (tmp_path / other.name).write_text(other.read_text().replace(program_there, sys.executable))
    assert done("systemd-analyze", "verify", tmp_path / unit.name).strip() == ""
    done("systemd-analyze", "security", "--offline=true", "--threshold=25", tmp_path / unit.name)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.stem))
def test_the_options_of_a_unit_are_known(unit: Path) -> None:
    start = re.search(r"^ExecStart=\S+ (\w+) (.*)$", unit.read_text(), flags=re.MULTILINE)
    assert start
    known = done(sys.executable, "-m", "tidegate", start[1], "--help")
    options = re.findall(r"--[\w-]+", start[2])
    assert options
    assert all(option in known for option in options)


def test_systemd_is_told_when_the_daemon_listens(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "tidegate-daemon.service").read_text()
    assert "\nType=notify\n" in unit
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0tidegate-test-" + tmp_path.name + str(os.getpid()))
        manager.settimeout(120)
        command = [sys.executable, "-m", "tidegate", "daemon", "--port", "0", "--state-dir", str(tmp_path)]
        address = "@" + manager.getsockname()[1:].decode()
        process = subprocess.Popen(command, env={**os.environ, "NOTIFY_SOCKET": address}, stdout=subprocess.DEVNULL)
        try:
            assert manager.recv(100) == b"READY=1"
            assert (home_of(tmp_path) / "operate.token").exists()
        finally:
            process.terminate()
            process.wait(20)


def test_kubernetes_relabelling_gives_the_labels_that_rules_ask_for(tmp_path: Path) -> None:
    """A real Prometheus relabels what Kubernetes would have said of three pods and an endpoint."""
    config = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-scrape.yml").read_text())

    def pod(number: int, **more: str) -> dict[str, object]:
        meta = {
            "pod_labelpresent_tidegate_run": "true", "pod_label_tidegate_run": "llama",
            "pod_label_tidegate_rank": str(number), "pod_node_name": f"node-{number}",
            "pod_container_port_name": "metrics", "pod_phase": "Running", "pod_ready": "true", **more,
        }  # fmt: skip
        labels = {f"__meta_kubernetes_{name}": value for name, value in meta.items()}
        return {"targets": [f"127.0.0.1:{number + 1}"], "labels": labels}

    found = {
        "tidegate-agent": [pod(0), pod(1, pod_phase="Succeeded"), pod(2, pod_container_port_name="http"),
                           pod(3, pod_labelpresent_tidegate_run=""), pod(4, pod_ready="false"),
                           pod(5, pod_label_tidegate_rank="", pod_label_batch_kubernetes_io_job_completion_index="1")],
        "tidegate-daemon": [{"targets": ["127.0.0.1:9"], "labels": {
            "__meta_kubernetes_service_name": "tidegate-daemon", "__meta_kubernetes_endpoint_port_name": "http"}}],
    }  # fmt: skip
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs")
        job["static_configs"] = found[job["job_name"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}", "--log.level=error",
         f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        active = until(lambda: _targets(prometheus, 3), "three targets")
    finally:
        process.terminate()
        process.wait(20)
    (indexed,) = (target for target in active if target["instance"] == "127.0.0.1:6")
    assert indexed["rank"] == "1", "the pod of an indexed job"
    by_job = {target["job"]: target for target in active if target is not indexed}
    assert by_job["tidegate-agent"] == {
        "job": "tidegate-agent", "instance": "127.0.0.1:1", "run": "llama", "rank": "0", "host": "node-0",
        "device_kind": "cuda",
    }  # fmt: skip
    assert by_job["tidegate-daemon"]["instance"] == "127.0.0.1:9"


def _targets(prometheus: Prometheus, count: int) -> list[dict[str, str]]:
    try:
        active = [target["labels"] for target in prometheus.ask("targets")["activeTargets"]]
    except (httpx.HTTPError, ValueError):  # while it starts it answers 503, in words
        return []
    return active if len(active) == count else []
