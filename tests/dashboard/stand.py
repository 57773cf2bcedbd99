"""Everything real: a daemon that can be killed, a training run, the live view's server, one browser for many pages."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect

from tests.dashboard.browser import PATIENCE_MS, chromium, is_ours, serve, settle, sign_in
from tests.services import ROOT, DaemonProcess, daemon_process, until

RUN = "llama-7b"
TRAINING = (
    "--width 384 --layers 3 --link-bytes-per-second 4e8 --update-params-per-second 3e6 "
    "--stride 1.5 --subgroup-numel 40000 --host-cache 2MiB --report-seconds 0.3"
)
"""The device is no help: `stride=off` shortens the update whatever else runs here."""
BEGIN, NEVER = "2026-03-01T10:00:00Z", "0001-01-01T00:00:00Z"


@dataclass
class Viewer:
    """One person's browser window, with what went wrong in it so far."""

    page: Page
    errors: list[str] = field(default_factory=list)

    def healthy(self) -> None:
        """No exception box, no part that could not be drawn, no console error."""
        expect(self.page.get_by_test_id("stException")).to_have_count(0)
        expect(self.page.get_by_text("could not be drawn")).to_have_count(0)
        assert self.errors == []

    def give_token(self, token: str) -> None:
        """Makes the page Tune more than read-only."""
        field = self.page.get_by_label("Operate token", exact=True)
        field.fill(token)
        field.press("Enter")
        expect(self.page.get_by_text("Changes are made with your operate token")).to_be_visible()


@dataclass
class Stand:
    daemon: DaemonProcess
    view: str
    browser: Browser

    @contextlib.contextmanager
    def viewer(self, path: str, *, dark: bool = False, height: int = 800, **query: str) -> Iterator[Viewer]:
        """A window of 1280 pixels at a page of the live view, drawn."""
        context = self.browser.new_context(
            viewport={"width": 1280, "height": height}, color_scheme="dark" if dark else "light"
        )
        sign_in(context, self.view, self.daemon.token("read"))
        viewer = Viewer(context.new_page())
        viewer.page.set_default_timeout(PATIENCE_MS)
        viewer.page.on("pageerror", lambda error: viewer.errors.append(str(error)))
        viewer.page.on("console", lambda m: viewer.errors.append(m.text) if is_ours(m) else None)
        try:
            viewer.page.goto(f"{self.view}/{path}?{'&'.join(f'{k}={v}' for k, v in query.items())}")
            settle(viewer.page)
            yield viewer
        finally:
            context.close()

    def alert(self, name: str, severity: str, knob: str, status: str = "firing", **more: str) -> None:
        """What Alertmanager's webhook would tell of the run."""
        told = {
            "status": status, "startsAt": BEGIN, "endsAt": NEVER if status == "firing" else "2026-03-01T10:05:00Z",
            "labels": {"alertname": name, "severity": severity, "run": RUN}, "fingerprint": f"{len(name):x}",
            "annotations": {"knob": knob, "runbook_url": f"docs/runbooks/{name}.md", **more},
        }  # fmt: skip
        answer = httpx.post(
            f"{self.daemon.url}/v1/alerts", json={"version": "4", "alerts": [told]}, trust_env=False,
            headers={"Authorization": f"Bearer {self.daemon.token('alert')}"},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text


@contextlib.contextmanager
def stand(base: Path) -> Iterator[Stand]:
    """All of it up, and a dozen steps done."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_process(base / "state"))
        stack.enter_context(_environment(daemon))
        stack.enter_context(_training(base, daemon.url))
        view = stack.enter_context(serve(daemon.url))
        browser = stack.enter_context(chromium())
        until(lambda: _answers(f"{view}/_stcore/health"), "the live view", 90)
        until(lambda: _steps(daemon) > 12, "a dozen steps", 120)
        yield Stand(daemon, view, browser)


@contextlib.contextmanager
def _environment(daemon: DaemonProcess) -> Iterator[None]:
    """What children find their tokens by."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        del os.environ[name]
    os.environ["TIDEGATE_STATE_DIR"] = str(daemon.state)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _training(base: Path, daemon_url: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.trainee", "--run", RUN, "--daemon", daemon_url, *TRAINING.split()]
    for name in ("nvme", "pfs"):
        (base / name).mkdir()
        command += ["--path", f"{name}={base / name}"]
    with (base / "training.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _steps(daemon: DaemonProcess) -> int:
    with daemon.client() as client:
        return max((run.step for run in client.runs()), default=0)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
