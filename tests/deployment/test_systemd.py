"""The units, started by a real systemd in a container, as the documentation says (`make test-containers`)."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.deployment import images
from tests.deployment.stack import Stack, documented
from tests.services import until

pytestmark = pytest.mark.torture
UNITS = ("tidegate-daemon", "tidegate-dashboard")
OPEN = """
import http.client, sys, urllib.parse
link = urllib.parse.urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(link.netloc)
connection.request("GET", f"{link.path}?{link.query}")
answer = connection.getresponse()
print(answer.status, answer.headers["set-cookie"] is not None)
"""


@dataclass(frozen=True)
class Machine:
    stack: Stack

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return self.stack.docker.run("exec", "machine", *command)

    def __call__(self, *command: str) -> str:
        done = self.run(*command)
        journal = self.run("journalctl", "--no-pager", "--lines=40").stdout if done.returncode else ""
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}{journal}"
        return done.stdout

    @property
    def address(self) -> str:
        return str(self.stack.docker.inspect("machine")["NetworkSettings"]["IPAddress"])

    def shown(self, unit: str, name: str) -> str:
        return self("systemctl", "show", "--value", "--property", name, unit).strip()

    def answer(self, port: int, path: str) -> str:
        code = (
            f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}{path}', timeout=5).read().decode())"
        )
        return self.run("python3", "-c", code).stdout.strip()

    def up(self) -> bool:
        return self.answer(8790, "/readyz") == '{"status":"ready"}' and self.answer(8501, "/_stcore/health") == "ok"


@pytest.fixture(scope="module")
def machine(stack: Stack) -> Machine:
    """A container in which systemd is the first process, set up with the commands of the documentation."""
    stack.say("a machine with systemd")
    image = images.build_systemd(stack.docker, stack.downloads, images.version_of(stack.project))
    words = [word for one in ("sys_admin", "sys_ptrace") for word in ("--cap-add", one)]
    words += [
        word for one in ("seccomp", "apparmor", "systempaths") for word in ("--security-opt", f"{one}=unconfined")
    ]
    words += [word for place in ("/run", "/run/lock", "/tmp:exec") for word in ("--tmpfs", place)]
    words += ["--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw", "--cgroupns", "host", "--env", "container=docker"]
    stack.docker("run", "--detach", "--name", "machine", *words, image)
    made = Machine(stack)
    until(lambda: made.run("systemctl", "is-system-running").stdout.strip() == "running", "systemd", 30)
    for line in documented("deployment.md", "useradd ", "cp deploy/systemd/"):
        made("bash", "-ec", f"cd /src && {line}")
    return made


def test_units_are_up_at_once_and_in_their_order(machine: Machine) -> None:
    assert "ready" in machine.answer(8790, "/readyz"), "systemctl returns when the daemon listens"
    until(machine.up, "daemon and live view", 60)
    assert [machine.shown(unit, "ActiveState") for unit in UNITS] == ["active", "active"]
    journal = machine("journalctl", "--no-pager", "--unit=tidegate-dashboard")
    assert "/open?code=" in journal
    assert "no operate token" not in journal, "the live view is started when the daemon has written its tokens"


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_confined(machine: Machine, unit: str) -> None:
    pid = machine.shown(unit, "MainPID")
    status = dict(re.findall(r"^(\w+):\s+(.*)$", machine("cat", f"/proc/{pid}/status"), re.MULTILINE))
    assert set(status["Uid"].split()) == {machine("id", "--user", "tidegate").strip()}
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    mounts = {line.split()[4]: line.split()[5].split(",") for line in
              machine("cat", f"/proc/{pid}/mountinfo").splitlines()}  # fmt: skip
    assert "ro" in mounts["/"]
    assert "ro" in mounts["/sys"]
    assert "rw" in mounts["/var/lib/tidegate" if unit == "tidegate-daemon" else "/var/lib/tidegate/codes"]
    inside = ("nsenter", "--target", pid, "--mount", "ls", "/dev/shm", "/dev/mem", "/home")
    assert "/dev/mem" in machine.run(*inside).stderr, "devices of the machine are not there"


def test_a_line_of_the_documentation_prints_a_link(machine: Machine) -> None:
    [line] = documented("deployment.md", "sudo -u tidegate env")
    [link] = re.findall(r"http://\S+", machine("bash", "-ec", line))
    assert machine("python3", "-c", OPEN, link).split() == ["303", "True"]


def test_the_documented_commands_reach_the_daemon(machine: Machine) -> None:
    [line] = documented("guides/respond-to-an-alert.md", "tidegate() { sudo ")
    assert "operate" in machine("bash", "-ec", f"{line}\ntidegate token list")
    machine("bash", "-ec", f"{line}\ntidegate status")


def test_a_backup_of_a_daemon_that_is_stopped_has_all_that_is_to_be_copied(machine: Machine) -> None:
    lines = documented("guides/move-the-daemon.md", "systemctl stop tidegate-daemon", "tar -C /var/lib -czf ",
                       "systemctl start tidegate-daemon")  # fmt: skip
    machine("bash", "-ec", "\n".join(["mkdir /backup", *lines]))
    files = machine("tar", "-tzf", "/backup/tidegate-state.tar.gz").split()
    kept = {
        "tidegate.db",
        "database.made",
        "proof.key",
        *(f"{one}.token" for one in ("read", "operate", "agent", "alert")),
    }
    assert kept <= {Path(name).name for name in files}
    until(machine.up, "daemon and live view", 60)


def test_a_unit_that_was_killed_is_started_again(machine: Machine) -> None:
    before = [machine.shown(unit, "MainPID") for unit in UNITS]
    for unit in UNITS:
        machine("systemctl", "kill", "--signal=KILL", unit)
    until(lambda: all(machine.shown(unit, "MainPID") not in ("0", *before) for unit in UNITS), "new processes", 30)
    until(machine.up, "daemon and live view", 60)
    assert [machine.shown(unit, "NRestarts") for unit in UNITS] == ["1", "1"]


def test_options_of_the_machine_open_the_daemon_to_others(machine: Machine) -> None:
    [line] = documented("deployment.md", "TIDEGATE_DAEMON_OPTIONS=")
    url = f"http://{machine.address}:8790/readyz"
    with pytest.raises(httpx.ConnectError):
        machine.stack.get(url)
    machine("bash", "-ec", f"mkdir -p /etc/tidegate && echo '{line}' > /etc/tidegate/daemon.env")
    machine("systemctl", "restart", "tidegate-daemon")
    assert machine.stack.get(url).status_code == 200


def test_a_boot_starts_both_units_again_with_their_state(machine: Machine) -> None:
    tokens = machine("sha256sum", "/var/lib/tidegate/operate.token")
    machine.stack.docker("restart", "machine", seconds=180)
    until(machine.up, "daemon and live view", 90)
    assert machine("sha256sum", "/var/lib/tidegate/operate.token") == tokens
