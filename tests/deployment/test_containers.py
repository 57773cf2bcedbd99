"""Images, built, and all services of docker-compose.yml but Grafana, run by a real Docker (`make test-containers`)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import images
from tests.deployment.compose import COMPOSE, Service, services
from tests.deployment.stack import STAY, Stack, documented
from tests.services import Prometheus, until
from tidegate.client.daemon_client import DaemonClient

pytestmark = pytest.mark.torture
UPGRADED = "9.9.9"
FEW_STEPS = "10"
THROUGH_ARROW = """
import io, pandas, pyarrow, pyarrow.parquet
file = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.Table.from_pandas(pandas.DataFrame({"x": [1.5, 2]})), file)
print(pandas.read_parquet(file).x.sum())
"""


def of_run(stack: Stack) -> Any:
    """The demo as the daemon knows it; None until it does."""
    found = [run for run in stack.ask(DaemonClient.runs) if run.run == "demo"]
    return found[0] if found else None


def trains(stack: Stack, after: int = -1) -> bool:
    """Whether the demo is live and has gone beyond a step."""
    run = of_run(stack)
    return run is not None and run.liveness == "live" and run.step > after


def generations(stack: Stack) -> list[tuple[int, dict[str, Any]]]:
    return [(one.generation, dict(one.knobs)) for one in stack.ask(lambda client: client.generations("demo"))]


def test_only_two_things_that_an_old_compose_does_not_know_are_left_out(stack: Stack) -> None:
    gone = set(COMPOSE.read_text().splitlines()) - set((stack.project / "docker-compose.yml").read_text().splitlines())
    assert {line.split(":")[0].strip() for line in gone} == {"name", "start_interval"}


def test_images_are_ours_and_small(stack: Stack) -> None:
    for target, torch in (("control", False), ("trainer", True)):
        name = f"tidegate-{target}:{images.version()}"
        config = stack.docker.inspect(name)["Config"]
        assert config["User"] == "10001:10001"
        assert config["Entrypoint"] == ["tidegate"]
        stack.say(f"{name}: {images.size(stack.docker, name) / 1e6:.0f} MB on top of the base image")
        run = ("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--entrypoint", "python", name, "-c")
        has = "from importlib.util import find_spec as f; print([n for n in ('torch', 'pip', 'streamlit') if f(n)])"
        assert stack.docker(*run, has).strip() == str(["torch", "streamlit"] if torch else ["streamlit"])
        # pip of the base image installs into this environment: an image that is built on this one needs no other.
        listed = stack.docker("run", "--rm", "--entrypoint", "pip", name, "list")
        assert "streamlit " in listed
        assert ("torch " in listed) is torch
        # The parts of Arrow that are gone are not missed: a table goes to Arrow, to a file and back.
        assert stack.docker(*run, THROUGH_ARROW).strip() == "3.5"


def test_all_services_are_healthy_by_their_own_checks(stack: Stack) -> None:
    for name in (*STAY, "trainer"):
        until(lambda name=name: stack.healthy(name), f"{name} healthy", 90)


@pytest.mark.parametrize("name", [*STAY, "trainer"])
def test_a_service_is_confined_as_the_file_says(stack: Stack, name: str) -> None:
    service: Service = services()[name]
    found = stack.docker.inspect(stack.container(name))
    assert found["HostConfig"]["ReadonlyRootfs"] is True
    status = dict(re.findall(r"^(\w+):\s+(.*)$", stack.inside(name, "cat", "/proc/1/status").stdout, re.MULTILINE))
    assert set(status["Uid"].split()) == {str(service.user[0])}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert "Read-only" in stack.inside(name, "touch", "/etc/written").stderr
    secrets = {Path(mount.target).name for mount in service.mounts if mount.target.startswith("/run/secrets/")}
    listed = stack.inside(name, "ls", "/run/secrets")
    assert set(listed.stdout.split()) == secrets
    for secret in secrets:
        assert len(stack.inside(name, "cat", f"/run/secrets/{secret}").stdout) >= 40
        assert stack.inside(name, "sh", "-c", f"echo x >> /run/secrets/{secret}").returncode != 0
    assert set(found["NetworkSettings"]["Networks"]) == {"tidegate_tidegate"}
    bindings = found["HostConfig"]["PortBindings"] or {}
    assert {(row["HostIp"], int(port.partition("/")[0])) for port, rows in bindings.items() for row in rows} == set(
        service.published
    )


def test_what_is_published_answers_on_the_machine(stack: Stack) -> None:
    for url in ("8790/readyz", "8790/docs", "8501/_stcore/health", "9090/-/ready", "9093/-/ready"):
        assert stack.get(f"http://127.0.0.1:{url}").status_code == 200, url
    for url in ("http://daemon:8790/readyz", "http://dashboard:8501/_stcore/health"):
        assert stack.inside("prometheus", "wget", "-q", "-O", "-", url).returncode == 0, "by its name, from a container"
    assert stack.get("http://127.0.0.1:8790/v1/runs").status_code == 401, "a request without a token"


def test_the_live_view_lets_in_who_has_the_link_that_its_container_prints(stack: Stack) -> None:
    done = stack.inside("dashboard", "tidegate", "dashboard", "--link")
    assert done.returncode == 0, done.stderr
    [link] = re.findall(r"http://\S+", done.stdout)
    before = stack.get("http://127.0.0.1:8501/")
    answer = stack.get(link)
    assert (before.status_code, answer.status_code) == (403, 303)
    assert "set-cookie" in answer.headers
    assert "set-cookie" not in before.headers


def test_the_documented_commands_reach_the_daemon(stack: Stack) -> None:
    until(lambda: trains(stack), "the demo to train", 60)
    [line] = documented("guides/respond-to-an-alert.md", "tidegate() { docker ")
    # The older compose is a command of its own, and here is no terminal.
    script = line.replace("docker compose exec", "docker-compose exec -T") + "\n"
    for command, said in (("status", "demo"), ("knobs get demo", "stride"), ("history --run demo", "@trainer")):
        assert said in stack.shell(f"{script}tidegate {command}")
    assert "operate" in stack.shell("docker-compose exec -T daemon tidegate token list")


def test_prometheus_has_all_targets_up_and_the_rules(stack: Stack) -> None:
    def up(prometheus: Prometheus) -> dict[str, str]:
        return {row["labels"]["instance"]: row["health"] for row in prometheus.ask("targets")["activeTargets"]}

    until(lambda: stack.prometheus(up) == {"trainer:9464": "up", "daemon:8790": "up"}, "all targets up", 60)
    series = 'tidegate_steps_total{run="demo",rank="0",host="trainer"}'
    until(lambda: stack.prometheus(lambda prometheus: prometheus.query(series)), "the run's metrics", 60)
    rules = stack.prometheus(lambda prometheus: prometheus.ask("rules"))["groups"]
    assert "TidegateUpdateStalled" in {rule["name"] for group in rules for rule in group["rules"]}
    managers = stack.prometheus(lambda prometheus: prometheus.ask("alertmanagers"))["activeAlertmanagers"]
    assert [manager["url"] for manager in managers] == ["http://alertmanager:9093/api/v2/alerts"]


def test_a_daemon_that_crashes_is_started_again_and_has_lost_nothing(stack: Stack) -> None:
    until(lambda: trains(stack), "the demo to train", 60)
    made = stack.ask(lambda client: client.set_knobs("demo", {"stride": 3}, reason="before the crash", wait=30.0))
    assert made.state == "committed", made
    before, step = generations(stack), of_run(stack).step
    # All processes but the first, which is Docker's `init`: it ends with the daemon.
    stack.inside("daemon", "python", "-c", "import os; os.kill(-1, 9)")
    until(lambda: stack.docker.inspect(stack.container("daemon"))["RestartCount"] == 1, "the restart", 30)
    until(lambda: stack.healthy("daemon"), "the daemon healthy", 60)
    until(lambda: trains(stack, step), "the demo to be there again", 60)
    assert generations(stack) == before
    assert stack.state("trainer")["Status"] == "running"


def test_a_daemon_that_was_killed_by_hand_stays_down_until_it_is_started(stack: Stack) -> None:
    before, step = generations(stack), of_run(stack).step
    stack.docker("kill", stack.container("daemon"))
    time.sleep(5)  # where Docker starts a container again, it does so within a second
    assert stack.state("daemon")["Status"] == "exited"
    assert stack.state("trainer")["Status"] == "running", "no daemon stops a training"
    stack.up("daemon")
    until(lambda: stack.healthy("daemon"), "the daemon healthy", 60)
    until(lambda: trains(stack, step), "the demo to be there again", 60)
    assert generations(stack) == before


def test_an_upgrade_keeps_the_volumes(stack: Stack) -> None:
    before, step = generations(stack), of_run(stack).step
    audit = [row.id for row in stack.ask(lambda client: client.audit("demo"))]
    # The training goes on with the image that it has.
    for name, old in (
        ("pyproject.toml", f'version = "{images.version()}"'),
        ("tidegate/__init__.py", f'__version__ = "{images.version()}"'),
        ("docker-compose.yml", f"tidegate-control:{images.version()}"),
    ):
        text = (stack.project / name).read_text()
        assert old in text, name
        (stack.project / name).write_text(text.replace(old, old.replace(images.version(), UPGRADED)))
    stack.say("image tidegate-control, upgraded")
    images.build(stack.docker, stack.project, stack.downloads, "control")
    stack.up("--no-deps", "daemon", "dashboard")
    until(lambda: stack.healthy("daemon") and stack.healthy("dashboard"), "the new ones healthy", 90)
    assert stack.get("http://127.0.0.1:8790/v1/openapi.json").json()["info"]["version"] == UPGRADED
    until(lambda: trains(stack, step), "the demo to be there again", 60)
    assert generations(stack) == before
    assert audit
    assert set(audit) <= {row.id for row in stack.ask(lambda client: client.audit("demo"))}


def test_an_alert_comes_back_to_the_daemon_with_its_token(stack: Stack) -> None:
    stack.docker("kill", stack.container("trainer"))
    stack.say("a rank is gone: the alert, through Prometheus and Alertmanager")

    def arrived() -> bool:
        return "TidegateAllAgentsLost" in {alert.alert for alert in stack.ask(lambda client: client.alerts("demo"))}

    until(arrived, "the alert at the daemon", 120)


def test_the_demo_trains_to_its_end(stack: Stack) -> None:
    stack.say(f"the demo, {FEW_STEPS} steps")
    stack.up("--no-deps", "trainer", steps=FEW_STEPS)
    until(lambda: stack.state("trainer")["Status"] == "exited", "the end of the demo", 120)
    log = stack.docker.run("logs", stack.container("trainer"))
    assert stack.state("trainer")["ExitCode"] == 0, log.stdout + log.stderr
    assert re.search(rf"step {FEW_STEPS}/{FEW_STEPS}", log.stdout + log.stderr), log.stdout + log.stderr
    volume = ("run", "--rm", "--volume", "tidegate_runs:/runs", "--entrypoint", "cat")
    summary = stack.docker(*volume, f"tidegate-control:{UPGRADED}", "/runs/runs/demo/summary.json")
    assert json.loads(summary)
    until(lambda: of_run(stack).liveness == "finished", "the goodbye", 30)
    assert stack.get("http://127.0.0.1:8790/sd").json() == []
