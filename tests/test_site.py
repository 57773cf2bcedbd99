"""The documentation site: its pages, its drawings, and programs on them. `make check` builds it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
import pytest
import torch
import yaml

import tidegate
from docs import docstrings, draw_plans, flowchart, hooks, write_reference
from tests.documented import blocks, program, replaced
from tests.services import ROOT
from tidegate import errors

DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md"))


def leaves(nav: Any) -> Iterator[str]:
    """The pages that a part of the navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


def test_the_navigation_names_every_page_once() -> None:
    assert sorted(leaves(SITE["nav"])) == PAGES


def test_the_site_is_built_strictly_and_by_make_check() -> None:
    assert SITE["strict"] is True
    assert SITE["theme"]["font"] is False, "fonts would come from another host"
    done = subprocess.run(["make", "-n", "-C", ROOT, "check"], capture_output=True, text=True, check=True)
    (command,) = re.findall(r"mkdocs build .*", done.stdout)
    assert "--strict" in command
    assert "--quiet" not in command, "warnings would not be counted"


def test_the_drawings_are_those_of_the_plans() -> None:
    assert draw_plans.main(["--check"]) == 0


def test_the_reference_pages_are_those_of_the_code() -> None:
    # In a process of its own: other tests change how the command line is shown.
    command = [sys.executable, "-m", "docs.write_reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_python_page_has_every_public_name() -> None:
    """But for errors, which have a page of their own."""
    named = re.findall(r"^::: tidegate\.(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(tidegate.__all__) - set(vars(errors)))


def test_generators_say_how_they_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_plans.main(["--help"]) == write_reference.main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err


def test_every_page_with_a_drawing_is_there() -> None:
    named = set(re.findall(r"\(images/([\w-]+)\.svg\)", (DOCS / "concepts.md").read_text()))
    assert named == set(draw_plans.PICTURES) == {file.stem for file in (DOCS / "images").glob("*.svg")}


def test_interleaving_is_drawn_as_the_shortest_update() -> None:
    """What the text beside the drawing says of its four plans."""
    off = draw_plans.seconds(draw_plans.update("off", 0.0, "sequential"))
    static = draw_plans.seconds(draw_plans.update("off", 0.25, "twinflow"))
    interleaved = draw_plans.seconds(draw_plans.update(2.0, 0.0, "interleaved"))
    both = draw_plans.seconds(draw_plans.update(2.0, 0.25, "interleaved"))
    assert both < interleaved < static < off


@pytest.mark.parametrize(
    ("repo_url", "expected"),
    [
        (None, "see examples (`examples/README.md`), [x](storage.md#on-disk), `bench/gpu.sh`"),
        (
            "https://git.example/tide/",
            "see [examples](https://git.example/tide/blob/HEAD/examples/README.md), [x](storage.md#on-disk), "
            "[`bench/gpu.sh`](https://git.example/tide/blob/HEAD/bench/gpu.sh)",
        ),
    ],
)
def test_links_out_of_docs(repo_url: str | None, expected: str) -> None:
    page = "see [examples](../examples/README.md), [x](storage.md#on-disk), [`bench/gpu.sh`](../bench/gpu.sh)"
    assert hooks.rewrite_outside_links(page, "gpu.md", repo_url) == expected


def test_blocks_in_numbered_lists_are_moved() -> None:
    (block,) = hooks.BLOCK_IN_LIST.findall("2. Look:\n\n   ```bash\n   ls\n   ```\n\n```bash\nls\n```\n")
    assert block == "   ```bash\n   ls\n   ```"


def test_links_within_docs_and_to_nothing_stay() -> None:
    page = "[a](../storage.md), [b](../../nothing.md), ![c](../images/live-view.png)"
    assert hooks.rewrite_outside_links(page, "guides/x.md", None) == page


@pytest.mark.parametrize("loaded", ['<script src="https://cdn.example/x.js">', "<link rel=x href=//fonts.example/f>"])
def test_a_page_that_loads_from_another_host_is_refused(loaded: str) -> None:
    assert hooks.FOREIGN.search(loaded)
    assert not hooks.FOREIGN.search('<a href="https://ui.perfetto.dev">x</a><script src="assets/x.js">')


def charts() -> list[str]:
    return re.findall(r"```mermaid\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)


def test_a_flowchart_has_all_nodes_and_arrows() -> None:
    assert charts()
    for source in charts():
        svg = flowchart.flowchart(source)
        labels = flowchart.NODE.findall(source)
        assert svg.count("<rect") == len(labels) == source.count('["')
        assert all(f">{label}</text>" in svg for _, label in labels)
        assert svg.count('fill="currentColor" fill-opacity') == source.count("-->"), "an arrow has one head"


def test_arrows_lead_from_layer_to_layer() -> None:
    layers, short = flowchart.layered(["a", "b", "c"], [("a", "b"), ("b", "c"), ("a", "c")])
    assert layers == [["a"], ["b", "a c 1"], ["c"]]
    assert short == [("a", "b"), ("b", "c"), ("a", "a c 1"), ("a c 1", "c")]


@pytest.mark.parametrize("spaces", [3, 4])
def test_items_of_a_list_are_items_whatever_they_hold(spaces: int) -> None:
    own = " " * spaces
    page = (
        f"1. One:\n\n{own}```bash\n{own}ls\n{own}```\n\n{own}A paragraph\n{own}of two lines.\n2. Two\n   goes on.\n\n"
        f"{own}| a |\n{own}| - |\n{own}| b |\n\n{own}The end.\n3. Three\n\n```text\n   three spaces\n1. of code\n```\n"
    )
    made = markdown.markdown(hooks.adapt_lists(page), extensions=["tables", "pymdownx.superfences"])
    assert made.count("<li>") == 3
    assert made.count("<ol>") == 1
    assert made.count("<table>") == 1
    assert "\n   three spaces\n1. of code" in re.sub("<[^>]+>", "", made)


def test_the_program_of_the_quickstart_learns(capsys: pytest.CaptureFixture[str]) -> None:
    source = replaced(program("quickstart", "In your own loop"), "range(200)", "range(51)")
    exec(compile(source, "quickstart.md", "exec"), {})
    first, last = map(float, re.findall(r"loss ([\d.]+)", capsys.readouterr().out))
    assert last < 0.6 * first


def test_the_whole_program_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = replaced(program("using", "A whole program"), "300, 100", "6, 2")

    def run(steps: int) -> list[str]:
        stops_early = replaced(source, "optimizer.num_steps, STEPS)", f"optimizer.num_steps, {steps})")
        exec(compile(stops_early, "using.md", "exec"), {})
        return capsys.readouterr().out.splitlines()

    first, *without_a_stop = run(6)
    assert first == "begins with step 0"
    assert [line.split(":")[0] for line in without_a_stop] == ["step 2", "step 4", "step 6"]
    shutil.rmtree("checkpoints")
    assert run(3) == [first, without_a_stop[0]]
    assert run(6) == ["begins with step 2", *without_a_stop[1:]]


def test_the_settings_for_storage_work(tmp_path: Path) -> None:
    (written,) = blocks("quickstart", "With storage")
    names: dict[str, Any] = {}
    exec("import tidegate, torch; model = torch.nn.Linear(4, 4)", names)
    exec(compile(replaced(written, "/nvme/tide", str(tmp_path)), "quickstart.md", "exec"), names)
    names["optimizer"].close()
    (written,) = blocks("guides/choose-paths", "5. Write it down")
    exec(compile(written, "choose-paths.md", "exec"), names)
    assert list(names["offload"].paths) == ["nvme", "pfs"]


def test_parameters_of_a_docstring_are_a_list() -> None:
    written = "Does it.\n\nparams, lr: as in torch.\nkeep: how many\n    stay.\n\nRaises ConfigError: never."
    listed = "Does it.\n\n- **params, lr**: as in torch.\n- **keep**: how many\n    stay.\n\nRaises ConfigError: never."
    assert docstrings.with_lists(written) == listed


def test_the_lines_for_checkpoints_resume_weights_state_and_schedule(tmp_path: Path) -> None:
    (written, *_) = blocks("checkpoints", "Saving and resuming")
    code = replaced(written, 'directory = "/nvme/tide/checkpoints"', f"directory = {str(tmp_path / 'new')!r}")
    at_start, _, while_training = code.partition("# while training\n")
    trained, resumed = prepared(seed=0), prepared(seed=1)
    exec(at_start, trained)
    assert trained["first_step"] == 0
    three_steps(trained)
    exec(while_training, trained)
    exec(at_start, resumed)
    assert resumed["first_step"] == 3
    for run in (trained, resumed):
        three_steps(run)
        assert run["schedule"].last_epoch == 6
        run["optimizer"].close()
    assert torch.equal(trained["model"].weight, resumed["model"].weight)
    assert trained["optimizer"].param_groups[0]["lr"] == resumed["optimizer"].param_groups[0]["lr"] < 0.1


def prepared(seed: int) -> dict[str, Any]:
    """Names that the lines use."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = tidegate.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return {"torch": torch, "tidegate": tidegate, "model": model, "optimizer": optimizer, "schedule": schedule}


def three_steps(run: dict[str, Any]) -> None:
    for _ in range(3):
        run["optimizer"].zero_grad()
        run["model"](torch.ones(2, 8)).square().sum().backward()
        run["optimizer"].step()
        run["schedule"].step()
