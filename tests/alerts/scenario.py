"""What wakes an operator up, end to end: a real fault, the alert, the runbook followed word by word, the alert gone.

`in_namespaces` runs it; it prints a record for each fault as a line of JSON, or SKIP and why it cannot be done here. It
needs root, loop devices and a control group for block I/O. All processes and mounts end with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.alerts.pages import follow
from tests.alerts.stand import BLKIO, PATHS, RUN, Stand, stand
from tests.services import PATIENCE, ROOT, until

SLOW, FAST = PATHS
THROTTLED_BYTES_PER_SECOND = 2_000_000
FREE_BYTES = 1 << 20
ALERT_SECONDS = 60.0
REST_SECONDS = 20.0
FOLLOW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """One fault and what came of it. Seconds to fire count from the fault, to resolve from the runbook's first
    command; durations of the rules are divided by `divisor`."""

    alert: str
    fault: str
    seconds_to_fire: float
    seconds_to_resolve: float
    told_the_daemon: bool
    """Whether the daemon heard of it while it fired, and of its end; impossible where the daemon is what is down."""
    commands: list[str]


@dataclass(frozen=True, kw_only=True)
class Case:
    alert: str
    fault: str
    inject: Callable[[Stand], object]
    heading: str = "What to do"
    """Of the runbook: the part that is followed."""
    labels: Callable[[dict[str, str]], bool] = lambda labels: True
    seen: Callable[[Stand], object] = lambda _: None
    """What else must be so while it fires."""
    values: Callable[[Stand], dict[str, str]] = lambda _: {}


def run(made: Stand, case: Case) -> Record:
    """Injects the fault and follows the runbook; AssertionError where an alert does not come or does not go."""
    firing = lambda: [a for a in made.firing(case.alert) if case.labels(a["labels"])]  # noqa: E731
    until(lambda: not firing(), f"{case.alert} at rest before there is a fault", REST_SECONDS)
    begin = time.monotonic()
    case.inject(made)
    (first, *_) = until(firing, f"{case.alert} firing", ALERT_SECONDS)
    to_fire = time.monotonic() - begin
    tells = case.alert != "TidegateDaemonDown"
    if tells:
        until(lambda: "firing" in told(made, case), f"{case.alert} at the daemon", ALERT_SECONDS)
    case.seen(made)
    values = {"RUN": RUN, "PORT": made.port, "STATE_DIR": str(made.state_dir), **case.values(made)}
    values |= {"CAUSE": first["labels"].get("cause", "")}
    begin = time.monotonic()
    done = follow(case.alert, case.heading, values, made.env, made.base, FOLLOW_SECONDS)
    until(lambda: not firing(), f"{case.alert} resolved", ALERT_SECONDS)
    to_resolve = time.monotonic() - begin
    if tells:
        until(lambda: told(made, case) == {"resolved"}, f"the end of {case.alert} at the daemon", ALERT_SECONDS)
    return Record(
        alert=case.alert,
        fault=case.fault,
        seconds_to_fire=round(to_fire, 1),
        seconds_to_resolve=round(to_resolve, 1),
        told_the_daemon=tells,
        commands=[line.replace(sys.executable, "python").replace(str(made.base), "/scenario") for line in done],
    )


def told(made: Stand, case: Case) -> set[str]:
    """States of the alert as the daemon has them."""
    with made.client() as client:
        return {a.state for a in client.alerts(RUN) if a.alert == case.alert and case.labels(a.labels)}


# ---- the faults


def throttle(made: Stand) -> None:
    made.throttle(SLOW, THROTTLED_BYTES_PER_SECOND)


def audited(made: Stand) -> None:
    with made.client() as client:
        rows = [row for row in client.audit(RUN) if row.action == "alert_firing"]
    assert any(row.after["alert"] == "TidegateUpdateStalled" and "%" in row.reason for row in rows), rows


def fill(made: Stand) -> None:
    made.throttles.close()
    command = [sys.executable, "-m", "tests.alerts.dead_run", str(made.directories[FAST]), str(FREE_BYTES)]
    died = subprocess.run(command, check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr


def kill_training(made: Stand) -> None:
    assert made.training is not None
    made.training.kill()
    made.training.wait()


def one_is_told(made: Stand) -> None:
    """That a rank is lost is no news where all are."""
    until(lambda: made.alertmanager.states("TidegateAgentLost") == ["suppressed"], "the inhibition", REST_SECONDS)


def kill_daemon(made: Stand) -> None:
    os.kill(made.daemon_pid(), signal.SIGKILL)


CASES = (
    Case(
        alert="TidegateUpdateStalled",
        fault=f"the kernel gives the run {THROTTLED_BYTES_PER_SECOND / 1e6:.0f} MB/s of path {SLOW}'s device, each way",
        inject=throttle,
        labels=lambda labels: labels["cause"].startswith(f"{SLOW}:"),
        seen=audited,
        heading="A storage path",
        values=lambda _: {"PATH_NAME": SLOW, "OTHER_PATH": FAST},
    ),
    Case(
        alert="TidegatePathNearlyFull",
        fault=f"a run dies and leaves its state on path {FAST}, {FREE_BYTES >> 20} MiB are free",
        inject=fill,
        labels=lambda labels: labels["path"] == FAST,
        values=lambda made: {"PATH_NAME": FAST, "DIRECTORY": str(made.directories[FAST]), "OTHER_PATH": SLOW},
    ),
    Case(
        alert="TidegateAllAgentsLost",
        fault="the training process is killed",
        inject=kill_training,
        seen=one_is_told,
        values=lambda made: {"TRAINING_COMMAND": made.training_command, "DIRECTORY": directories(made)},
    ),
    Case(
        alert="TidegateDaemonDown",
        fault="the daemon is killed",
        inject=kill_daemon,
    ),
)


SECONDS = PATIENCE * (120.0 + len(CASES) * (4 * ALERT_SECONDS + 2 * REST_SECONDS + 2 * FOLLOW_SECONDS))
"""More than all limits inside together, so that it is one of those that tells what is wrong."""


def directories(made: Stand) -> str:
    """Of all paths, as the option of `tidegate doctor` takes them."""
    return " --path ".join(map(str, made.directories.values()))


def play(base: Path, cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    with stand(base) as made:
        return [asdict(run(made, case)) for case in cases]


def in_namespaces(base: Path, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """All of it in a process with mounts and processes of its own, which end with it."""
    own = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*own, sys.executable, "-m", "tests.alerts.scenario", str(base)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)


def main(base: Path) -> None:
    if not BLKIO.is_dir() or not os.access(BLKIO, os.W_OK):
        print("SKIP there is no controller for block I/O (cgroup blkio) on this machine")
        return
    for record in play(base):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
