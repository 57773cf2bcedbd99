"""A script starts again under the name of its run: the run's knobs hold, whatever the script asks for.

Every pair of a script's value and a run's value is tried for each knob, with a real daemon.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests import forked
from tests.agent.plain_adamw import PlainAdamW
from tests.services import ROOT, DaemonProcess, daemon_process, until
from tidegate.agent.telemetry import exporter
from tidegate.client.daemon_client import DaemonClient
from tidegate.knobs.knobs import SPECS, same, show, weights_of

NUMEL, SUBGROUPS = 1024, 6
PLAIN = str.maketrans(":,", "--")
ABSENT = "absent"
"""The script does not give the knob: its default counts."""
VALUES: dict[str, tuple[Any, ...]] = {
    "stride": (2.0, 1.5, "auto", "off"),
    "static_ratio": (0.0, 0.5, 1.0),
    "tier_split": ("auto", "eq1", "nvme:1", "nvme:2,pfs:1"),
    "host_cache": (0, 30_000, "4MB", "auto"),
    "order": ("auto", "pinned", "alternate"),
}
PAIRS = [(name, *pair) for name, values in VALUES.items() for pair in itertools.product((ABSENT, *values), values)]
EFFECTIVE: dict[str, dict[Any, Any]] = {
    "stride": {2.0: 2, 1.5: 1.5, "off": "off"},
    "static_ratio": {0.0: 0, 0.5: 0.5, 1.0: 1},
    "host_cache": {0: 0, 30_000: 30_000, "4MB": 4_000_000},
    "order": {"pinned": "pinned", "alternate": "alternate"},
}
"""What a rank uses for a value of the run. `auto` and the shares of paths are looked at one by one."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon_process(tmp_path_factory.mktemp("daemon") / "state") as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: DaemonProcess) -> Iterator[DaemonClient]:
    with daemon.client() as made:
        yield made


@pytest.fixture(autouse=True)
def _servers_of_metrics_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "POLL_SECONDS", 0.01)


def parameters() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(NUMEL, generator=draw).bfloat16()) for _ in range(SUBGROUPS)]


def optimizer_of(params: list[torch.nn.Parameter], folder: Path, **given: Any) -> tidegate.AdamW:
    """The optimizer of a script that gives these knobs, with two paths."""
    paths = {name: folder / name for name in ("nvme", "pfs")}
    for directory in paths.values():
        directory.mkdir(exist_ok=True)
    offload = tidegate.Offload(
        device="emulated", subgroup_numel=NUMEL, num_slots=2, cpu_threads=1, paths=paths, **given
    )
    return tidegate.AdamW(params, lr=1e-2, offload=offload)


def trains_like_the_oracle(optimizer: tidegate.AdamW, params: list[torch.nn.Parameter], steps: int = 4) -> None:
    plain = PlainAdamW([dict(group) for group in optimizer.param_groups])
    draw = torch.Generator().manual_seed(5)
    for _ in range(steps):
        grads = [torch.randn(NUMEL, generator=draw).bfloat16() for _ in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        plain.step(list(grads))
    optimizer.wait()
    assert plain.same_weights(params)


def normal(name: str, value: Any) -> Any:
    return SPECS[name].parse("auto" if value == ABSENT and name != "static_ratio" else 0 if value == ABSENT else value)


@pytest.mark.parametrize(("name", "script", "of_run"), PAIRS)
def test_the_run_goes_on_with_its_knobs(
    daemon: DaemonProcess, client: DaemonClient, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    name: str, script: Any, of_run: Any,
) -> None:  # fmt: skip
    run, token = f"{name}-{PAIRS.index((name, script, of_run))}", daemon.token("agent")
    given = {} if script == ABSENT else {name: script}
    if name == "tier_split":
        given["host_cache"] = 0  # all state is on the paths
    with optimizer_of(parameters(), tmp_path, **given) as optimizer:
        tidegate.attach(optimizer, run=run, daemon=daemon.url, token=token, strict=True)
    wanted = normal(name, of_run)
    client.set_knobs(run, {name: of_run})
    caplog.clear()
    params = parameters()
    with optimizer_of(params, tmp_path, **given) as optimizer:
        began_with = optimizer.knobs
        attachment = tidegate.attach(optimizer, run=run, daemon=daemon.url, token=token, strict=True)
        assert attachment.link is not None
        assert attachment.link.connected
        assert optimizer.knobs == began_with.changed({name: of_run})
        assert attachment.generation == 1
        used = EFFECTIVE.get(name, {}).get(of_run)
        assert used is None or optimizer.effective_knobs()[name] == used
        trains_like_the_oracle(optimizer, params)
        effective = optimizer.effective_knobs()
        if name == "tier_split":
            held = weights_of(str(effective[name]))
            assert sum(held.values()) == SUBGROUPS
            assert held["pfs"] == {"nvme:1": 0, "nvme:2,pfs:1": 2}.get(of_run, held["pfs"])
        if (name, of_run) == ("host_cache", "auto"):
            assert float(effective[name]) > 4_000_000, "most of the memory that is free"
    told = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "knobs_kept"]
    own = normal(name, script)
    difference = f"{name}={show(name, wanted)}, not {show(name, own)}."
    assert [difference in text for text in told] == ([] if same(name, wanted, own) else [True])


@pytest.mark.parametrize("of_run", [{"host_cache": "auto"}, {"host_cache": "4MB"}, {"tier_split": "nvme:2,pfs:1"}])
def test_a_script_that_has_no_paths_any_more_goes_on(
    daemon: DaemonProcess,
    client: DaemonClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    of_run: dict[str, Any],
) -> None:
    run, token = f"no-paths-{'-'.join(map(str, of_run.values())).translate(PLAIN)}", daemon.token("agent")
    with optimizer_of(parameters(), tmp_path, host_cache=0) as optimizer:
        tidegate.attach(optimizer, run=run, daemon=daemon.url, token=token, strict=True)
    client.set_knobs(run, {**of_run, "stride": "off"})
    params = parameters()
    with tidegate.AdamW(
        params, lr=1e-2, offload=tidegate.Offload(device="emulated", subgroup_numel=NUMEL)
    ) as optimizer:
        tidegate.attach(optimizer, run=run, daemon=daemon.url, token=token, strict=True)
        assert optimizer.effective_knobs() == {"stride": "off", "static_ratio": 0.0}
        trains_like_the_oracle(optimizer, params)
    told = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "knobs_kept"]
    assert ["differ from the script's: stride=off, not auto. " in text for text in told] == [True]


@pytest.mark.parametrize("of_run", ["auto", "4MB"])
def test_reset_takes_the_number_of_the_script(
    daemon: DaemonProcess, client: DaemonClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, of_run: str
) -> None:
    run, token = f"reset-{of_run}", daemon.token("agent")
    for reset in (False, True):
        with optimizer_of(parameters(), tmp_path, host_cache=0) as optimizer:
            tidegate.attach(optimizer, run=run, daemon=daemon.url, token=token, strict=True, reset_knobs=reset)
            assert optimizer.effective_knobs()["host_cache"] == 0
        if not reset:
            client.set_knobs(run, {"host_cache": of_run})
    assert client.knobs(run).desired["host_cache"] == 0
    assert not [record for record in caplog.records if getattr(record, "event", "") == "knobs_kept"]


def trainee(daemon: DaemonProcess, folder: Path) -> subprocess.Popen[Any]:
    """A script whose host_cache is a number, as a process."""
    (folder / "nvme").mkdir(exist_ok=True)
    words = (
        f"--run killed --daemon {daemon.url} --path nvme={folder / 'nvme'} --width 64 --layers 2 --stride 2 "
        "--host-cache 0 --link-bytes-per-second 4e8 --update-params-per-second 1e8 --subgroup-numel 4096 "
        "--report-seconds 0.2"
    )
    environment = {**os.environ, "TIDEGATE_AGENT_TOKEN": daemon.token("agent"), "OMP_NUM_THREADS": "1"}
    return forked.Popen([sys.executable, "-m", "tests.trainee", *words.split()], cwd=ROOT, env=environment)


@pytest.mark.timeout(120)
def test_a_killed_run_whose_cache_an_operator_set_to_auto_starts_again(
    daemon: DaemonProcess, client: DaemonClient, tmp_path: Path
) -> None:
    for generation, cached in ((0, False), (1, True)):
        process = trainee(daemon, tmp_path)
        try:
            until(lambda: any(run.run == "killed" for run in client.runs()), "the run")
            until(lambda pid=process.pid: _steps(client, pid) > 2, "steps of this process")  # type: ignore[misc]
            rank = client.run("killed").ranks[0]
            assert (rank.applied_generation, rank.effective["host_cache"] != 0) == (generation, cached)
            if not cached:
                client.set_knobs("killed", {"host_cache": "auto"})
                until(lambda: client.run("killed").ranks[0].applied_generation == 1, "the knobs of the operator")
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _steps(client: DaemonClient, pid: int) -> int:
    """Steps of the rank, if it is held by this process; else 0."""
    rank = client.run("killed").ranks[0]
    return rank.step if rank.pid == pid else 0
