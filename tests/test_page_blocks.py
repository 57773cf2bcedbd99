"""The programs and commands of the pages: each block is run, here or by the test that `ELSEWHERE` names.

A block that cannot run in a test is in `NOT_RUN`, with the reason. Runbooks have tests of their own (tests/alerts).
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tidegate
from tests.alerts.test_runbooks import taken
from tests.daemon.live import Daemon, threaded, wait_until
from tests.documented import DAEMON
from tests.services import ROOT
from tidegate.cli.main import app
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.rules.rule import Hyperparameter, StateTensor, UpdateRule

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash")


def blocks_of(page: str, *languages: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [block for _, language, block in BLOCK.findall(text) if language in languages]


# ---- Python

ELSEWHERE = {
    ("docs/using.md", 2): "tests/test_site.py",
    ("docs/quickstart.md", 0): "tests/test_site.py",
    ("docs/quickstart.md", 1): "tests/test_site.py",
    ("docs/guides/choose-paths.md", 0): "tests/test_site.py",
    ("docs/frameworks.md", 0): "tests/test_examples.py",
    ("docs/frameworks.md", 2): "tests/agent/integrations/accelerate_ranks.py",
    ("docs/frameworks.md", 3): "tests/agent/integrations/accelerate_ranks.py",
    ("docs/frameworks.md", 4): "tests/agent/integrations/test_lightning_callback.py",
    ("docs/frameworks.md", 5): "tests/agent/integrations/torchtitan_ranks.py",
}
"""The test that runs a block of Python, by page and number of the block."""
NOT_RUN = {
    ("docs/frameworks.md", 1): "arguments of the reader's Trainer, with … for the others; examples/ has it whole",
    ("docs/frameworks.md", 6): "DeepSpeed compiles for minutes; examples/deepspeed_json.py has the two lines, and runs",
}
PROGRAMS = [(page, number) for page in PAGES for number in range(len(blocks_of(page, "python")))]


class Model(torch.nn.Module):
    """Returns an object with its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(input_ids.to(self.layer.weight.dtype)).square().mean())


def given(folder: Path) -> dict[str, Any]:
    """What the pages take as there."""
    model = Model()
    offload = tidegate.Offload(paths={"nvme": folder})
    optimizer = tidegate.AdamW(model.parameters(), lr=1e-3, offload=offload)
    model(torch.ones(2, 8)).loss.backward()
    optimizer.step()
    names: dict[str, Any] = {
        "tidegate": tidegate, "torch": torch, "model": model, "optimizer": optimizer,
        "batches": [{"input_ids": torch.ones(2, 8)}] * 2, "directory": folder / "checkpoints",
        "schedule": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "UpdateRule": UpdateRule, "StateTensor": StateTensor, "Hyperparameter": Hyperparameter,
        "Implementation": Implementation, "find": lambda _: names["RULE"],
    }  # fmt: skip
    return names


def test_each_block_of_python_is_run() -> None:
    assert len(PROGRAMS) == 22
    assert set(ELSEWHERE) | set(NOT_RUN) <= set(PROGRAMS)
    for (page, _), test in ELSEWHERE.items():
        source = (ROOT / test).read_text()
        assert re.search(rf'(?:program|blocks)\("{page[5:-3]}"', source), f"{test} runs no block of {page}"


HERE = [one for one in PROGRAMS if one not in ELSEWHERE | NOT_RUN]


@pytest.mark.parametrize("page", sorted({page for page, _ in HERE}))
def test_programs_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    for folder in ("nvme/tide", "pfs/me/tide"):
        (tmp_path / folder).mkdir(parents=True)
    names = given(tmp_path / "nvme" / "tide")
    for number, block in enumerate(blocks_of(page, "python")):
        if (page, number) in HERE:
            if re.search(r"tidegate\.(AdamW|Optimizer)\(", block):
                names["optimizer"].close()  # one optimizer for the parameters of a model
            source = block.replace(DAEMON, "daemon=None").replace('device="cuda"', 'device="cpu"')
            source = source.replace("64GiB", "1MiB").replace("save_also=...", "save_also=None")
            exec(compile(re.sub(r'"/(nvme|pfs)/', rf'"{tmp_path}/\1/', source), page, "exec"), names)
    names["optimizer"].close()


# ---- the shell

NO_COMMAND_OF_OURS = re.compile(
    r"make |pip install|\.venv/bin/python|ssh |sudo |systemctl|docker|tar |install |chown|chmod|cp |umask|sed |export "
    r"|tidegate\(\)|url=|token=|etag=|curl |amtool |  |$"
)
"""Lines that install, deploy, or talk to another host; a block of `docs/control.md` with curl is run by
`tests/daemon/routes/test_knobs.py`."""
NO_END = re.compile(r"tidegate (?:daemon|dashboard|events --follow|status --watch)")
"""Commands that run until they are stopped. `tests/cli/test_cli.py` and `tests/demo/` run them."""
SLOW = re.compile(r"tidegate (?:calibrate|plan --model llama-70b --gpus 4 --host-memory 512 --rates)")
"""Commands that measure the machine for half a minute, and what needs their file: `tests/agent/calibration/`."""
COMMANDS = [
    (page, re.sub(r"\s+(?:#|> ).*", "", line.removeprefix(".venv/bin/")))
    for page in PAGES
    if not page.startswith(("docs/runbooks/", "docs/architecture.md", "docs/reference/command-line.md"))
    for block in blocks_of(page, *SHELL)
    for line in block.splitlines()
    if line.removeprefix(".venv/bin/").startswith("tidegate ")
]


def test_each_line_of_shell_is_known() -> None:
    """Runs, or has a reason why it does not."""
    for page in PAGES:
        if not page.startswith("docs/runbooks/"):
            for block in blocks_of(page, "bash"):
                for line in block.splitlines():
                    ours = line.strip().removeprefix(".venv/bin/").startswith("tidegate ")
                    assert ours or NO_COMMAND_OF_OURS.match(line), f"{page}: {line}"
    assert len(COMMANDS) == 45
    assert [line for _, line in COMMANDS if NO_END.match(line) or SLOW.match(line)]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_the_command_line_takes_each_command(page: str, line: str) -> None:
    taken(shlex.split(line.replace("RANK", "0"))[1:])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    """A daemon, and a run on paths `nvme` and `pfs` that trains until the test ends; two runs have ended."""
    folder, end = tmp_path_factory.mktemp("pages"), threading.Event()
    for name in ("nvme", "pfs"):
        (folder / name).mkdir()
    with threaded(folder / "state") as daemon:
        token = daemon.tokens["agent"]

        def train(run: str, steps: int) -> None:
            model = torch.nn.Linear(64, 64)
            offload = tidegate.Offload(paths={name: folder / name for name in ("nvme", "pfs")}, subgroup_numel=512)
            with (
                tidegate.AdamW(model.parameters(), lr=1e-3, offload=offload) as optimizer,
                tidegate.attach(optimizer, model, run=run, daemon=daemon.url, token=token),
            ):
                while not end.is_set() and optimizer.num_steps < steps:
                    model(torch.ones(4, 64)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    end.wait(0.01)

        for ended in ("llama-1", "llama-2"):
            train(ended, 3)
        thread = threading.Thread(target=train, args=("llama", 1_000_000))
        thread.start()
        try:
            with daemon.client() as client:
                wait_until(lambda: any(run.run == "llama" for run in client.runs()), "the run")
                for stride in (2.0, 3.0, 4.0, 5.0):
                    client.set_knobs("llama", {"stride": stride}, wait=10.0)
            yield daemon, folder
        finally:
            end.set()
            thread.join(30)


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_commands_of_a_page_run_one_after_the_other(
    page: str, training: tuple[Daemon, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, folder = training
    monkeypatch.setenv("TIDEGATE_DAEMON", daemon.url)
    monkeypatch.setenv("TIDEGATE_STATE_DIR", str(folder / "state"))
    monkeypatch.chdir(folder)
    with daemon.client() as client:  # so that there is something to take back
        client.set_knobs("llama", {"stride": 100.0 + PAGES.index(page)}, wait=10.0)
    for _, line in filter(lambda one: one[0] == page, COMMANDS):
        if not NO_END.match(line) and not SLOW.match(line):
            line = line.replace("RUN", "llama").replace("RANK", "0").replace("/tmp/", f"{folder}/")
            line = re.sub(r"(?<= |=)/(nvme|pfs)/\S+|DIRECTORY", str(folder / "nvme"), line)
            line = line.replace("runs delete", "runs delete --yes")  # there is no terminal to ask on
            done = wait_until(partial(answer, shlex.split(line)[1:]), line)
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"


def answer(words: list[str]) -> Any:
    """What a command says; None while it asks to be repeated (a canary needs a few steps to compare with)."""
    done = CliRunner().invoke(app, words, input="y\n")
    return None if "try again in a moment" in str(done.exception) else done
