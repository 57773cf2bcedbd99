"""Every service of docker-compose.yml but Grafana, started as that file says, in namespaces of its own."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.deployment.compose import services
from tests.deployment.containers import Engine, engine, why_not
from tests.services import ROOT, until

STEPS = "100"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"the services cannot be started as in containers: {reason}")
    folder = tmp_path_factory.mktemp("compose")
    secrets = folder / "secrets"
    subprocess.run([ROOT / "deploy" / "make-secrets", secrets], check=True, capture_output=True)
    found = services(TIDEGATE_STEPS=STEPS)
    # The trainer last: it is done soon, and Prometheus is to see it. Nothing waits for it.
    chosen = {name: found[name] for name in sorted(found, key="trainer".__eq__) if name != "grafana"}
    with engine(folder, secrets, chosen) as made:
        tell_alertmanager(made)
        yield made


def tell_alertmanager(engine: Engine) -> None:
    """It collects for 15 s before it tells the daemon: so it is told first."""
    alert = '[{"labels": {"alertname": "TidegateTest", "severity": "info", "run": "demo"}}]'
    sent = ("--post-data", alert, "--header", "Content-Type: application/json")
    url = "http://alertmanager:9093/api/v2/alerts"
    assert engine.containers["prometheus"].run("wget", "-q", "-O", "-", *sent, url).returncode == 0


def get(engine: Engine, by: str, url: str) -> str:
    """What `by` gets from another container, by its name."""
    done = engine.containers[by].run("wget", "-q", "-T", "10", "-O", "-", url)
    assert done.returncode == 0, (url, done.stderr)
    return done.stdout


def query(engine: Engine, expression: str) -> list[dict[str, Any]]:
    answer = json.loads(get(engine, "alertmanager", f"http://prometheus:9090/api/v1/query?query={quote(expression)}"))
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def was_up(engine: Engine) -> bool:
    """Whether the trainer was ever scraped: it may have ended since."""
    found = query(engine, 'max_over_time(up{instance="trainer:9464"}[10m])')
    return bool(found) and found[0]["value"][1] == "1"


def up(engine: Engine) -> dict[str, bool]:
    targets = json.loads(get(engine, "alertmanager", "http://prometheus:9090/api/v1/targets"))["data"]["activeTargets"]
    return {target["labels"]["instance"]: target["health"] == "up" for target in targets}


@pytest.mark.timeout(600)
def test_prometheus_sees_all_targets_up_and_the_demo_runs_through(running: Engine) -> None:
    trainer = running.containers["trainer"]
    until(lambda: was_up(running) and up(running)["daemon:8790"], "all targets up", 90)
    until(lambda: query(running, 'tidegate_steps_total{run="demo",rank="0",host="trainer"}'), "the run's metrics", 60)
    assert trainer.process is not None
    assert trainer.process.wait(450) == 0, trainer.log
    assert re.search(rf"step {STEPS}/{STEPS}", trainer.log), trainer.log
    assert (running.folder / "volumes" / "runs" / "runs" / "demo" / "summary.json").is_file()
    until(lambda: up(running) == {"daemon:8790": True}, "the rank that said goodbye to be gone", 60)


@pytest.mark.timeout(600)
def test_all_that_stay_are_healthy_by_their_own_checks(running: Engine) -> None:
    stay = {name: c.healthy() for name, c in running.containers.items() if c.service.raw["restart"] != "no"}
    assert stay == dict.fromkeys(("daemon", "dashboard", "alertmanager", "prometheus"), True)


@pytest.mark.timeout(600)
def test_published_ports_are_listened_on_where_others_reach_them(running: Engine) -> None:
    for name, container in running.containers.items():
        for _, port in container.service.published:
            path = {"daemon": "/readyz", "dashboard": "/_stcore/health"}.get(name, "/-/ready")
            by = "prometheus" if name != "prometheus" else "alertmanager"
            until(lambda by=by, url=f"http://{name}:{port}{path}": get(running, by, url), f"{name}:{port}", 30)


@pytest.mark.timeout(600)
def test_prometheus_has_the_rules_and_found_alertmanager(running: Engine) -> None:
    def ask(what: str) -> Any:
        return json.loads(get(running, "alertmanager", f"http://prometheus:9090/api/v1/{what}"))["data"]

    groups = ask("rules")["groups"]
    names = {rule["name"] for group in groups for rule in group["rules"]}
    assert "TidegateUpdateStalled" in names
    managers = until(lambda: ask("alertmanagers")["activeAlertmanagers"], "Alertmanager", 30)
    assert [manager["url"] for manager in managers] == ["http://alertmanager:9093/api/v2/alerts"]


@pytest.mark.timeout(600)
def test_tokens_are_the_mounted_ones_and_each_service_has_only_its_own(running: Engine) -> None:
    daemon, dashboard = running.containers["daemon"], running.containers["dashboard"]
    assert not list((running.folder / "volumes" / "daemon-state").glob("*.token"))
    assert dashboard.run("tidegate", "status", "--daemon", "http://daemon:8790").returncode == 0
    assert dashboard.run("cat", "/run/secrets/agent.token").returncode != 0
    assert daemon.run("cat", "/run/secrets/agent.token").returncode == 0


@pytest.mark.timeout(600)
def test_what_alertmanager_tells_the_daemon_arrives(running: Engine) -> None:
    accepted = 'sum(tidegate_requests_total{route="/v1/alerts",status="2xx"})'
    until(lambda: query(running, accepted), "the daemon to be told", 60)


@pytest.mark.timeout(600)
def test_nobody_is_root_and_the_files_cannot_be_written(running: Engine) -> None:
    for name, container in running.containers.items():
        if container.process is None or container.process.poll() is not None:
            continue
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{container.process.pid}/status").read_text().splitlines()
        )
        assert set(status["Uid"].split()) == {str(container.service.user[0])}, name
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0, name
        assert status["NoNewPrivs"] == "1", name
        assert "Read-only" in container.run("touch", "/etc/written").stderr, name
