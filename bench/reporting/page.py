"""The page of results and its plots, from the files in bench/results."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from reporting import gpu, plots
from reporting.claims import CLAIMS, Claim
from reporting.figures import COUNT, PERCENT, Bound, markdown_table, status, table, verdicts
from reporting.lines import Line, Runs, runs_of

HEAD: Final = (
    "# Results",
    "Each section has one claim, the figures of the newest committed run, and what they say about the claim. *Emulated "
    "GPU* means that no GPU was used: the CPU emulates it, and such figures say nothing about a real GPU. "
    "*Committed runs* is the number of runs in the file. Machines with 2 cores are virtual machines, whose host has "
    "other tenants. [bench/README.md](../bench/README.md) says how to run each bench and how to read it.",
    "`python bench/results_page.py` writes this page and its plots from the files in `bench/results/`. The lines do "
    "not hold the commit of a run. `git blame` of a file shows the commit that added each line.",
)

UNCOMMITTED: Final = {
    "copies.py": "a prediction of the simulator, which takes seconds",
    "direct_io.py": "its figures are those of a disk, so run it on yours",
    "host_cost.py": "no bound; compares two versions of the code on one machine",
    "statements.py": "no claim; counts the statements of the code",
    "triton_registers.py": "what the compiler says of each kernel; a test holds the bound",
    "results_page.py": "writes this page",
}
"""Scripts of `bench/` that have no committed result, and why."""

ELSEWHERE: Final = {
    "deepspeed-losses-amd-epyc-2-cores.jsonl": "losses beside DeepSpeed's own: [frameworks](frameworks.md)",
    "deepspeed-own-tests.jsonl": "DeepSpeed's own tests with Tidegate: [conformance](conformance.md)",
}
"""Results of tests, which other pages explain."""

_PAPERS_BOUND: Final = Bound("at most", 0.2)
_MISSED: Final = "**the bound is missed**"


def files(results: Path) -> dict[str, str]:
    """The text of the page and of each plot, by its path in the repository. results: the folder bench/results."""
    found = {claim: runs_of(results, claim.prefix, claim.kind) for claim in CLAIMS}
    papers = json.loads((results / "papers.json").read_text())
    machines = gpu.gpus(results)
    parts = [
        *HEAD,
        _summary(found, papers, machines),
        *(paragraph for claim, runs in found.items() for paragraph in section(claim, runs)),
        *_papers(papers),
        *_runbooks(json.loads((results / "runbooks.json").read_text())),
        *_gpu(machines),
        *_rest(),
    ]
    drawings = {name: svg for claim, runs in found.items() for name, svg in _drawings(claim, runs).items()}
    drawings["papers"] = plots.papers(papers["rows"])
    for machine in machines:
        drawings |= gpu.drawings(machine)
    svgs = {f"docs/images/results/{name}.svg": svg for name, svg in drawings.items()}
    return {"docs/results.md": "\n\n".join(map(_wrapped, parts)) + "\n", **svgs}


def section(claim: Claim, found: Sequence[Runs]) -> Iterator[str]:
    """The paragraphs of one claim."""
    yield f"## {claim.script.removesuffix('.py')}"
    yield f"**Claim.** {claim.statement}"
    if not found:
        yield "There is no committed result."
        return
    yield table(claim.figures, found, claim.device_of)
    if claim.spread not in ("not measured", "not shown"):
        yield f"In brackets: {claim.spread}."
    yield verdicts(claim.figures, found)
    for name, shown in _plots(claim, found).items():
        if claim.plot_each:
            yield f"On {shown[0].label}:"
        yield f"![{claim.script}: {claim.plot_caption}](images/results/{name}.svg)"
    if claim.notes:
        yield " ".join(claim.notes)
    yield f"Data: {_links(dict.fromkeys(runs.file.name for runs in found))}. Script: `bench/{claim.script}`."


def _plots(claim: Claim, found: Sequence[Runs]) -> dict[str, Sequence[Runs]]:
    """The names of the plots of a claim, and the runs in each."""
    if not claim.plot or not found:
        return {}
    if claim.plot_each:
        return {f"{claim.prefix}-{re.sub('[^a-z0-9]+', '-', runs.label.lower())}": [runs] for runs in found}
    return {claim.prefix: found}


def _drawings(claim: Claim, found: Sequence[Runs]) -> dict[str, str]:
    return {name: claim.plot(runs) for name, runs in _plots(claim, found).items() if claim.plot}


def _summary(found: Mapping[Claim, Sequence[Runs]], papers: Line, machines: Sequence[gpu.Gpu]) -> str:
    """One row for each section: what its newest runs say."""
    rows = [
        [_section_link(claim.script), "; ".join(status(claim.figures, one) for one in runs) or "no committed result"]
        for claim, runs in found.items()
    ]
    rows += [
        [
            _section_link("papers.py"),
            "within the bound" if _PAPERS_BOUND.holds(papers["median_abs_error"]) else _MISSED,
        ],
        [_section_link("runbooks.py"), "no bound"],
        [_section_link("gpu.sh"), "; ".join(gpu.status(machine) for machine in machines)],
    ]
    return markdown_table(["claim", "newest runs"], rows)


def _section_link(script: str) -> str:
    name = script.partition(".")[0]
    return f"[{name}](#{name})"


def _wrapped(part: str) -> str:
    """A paragraph in lines of at most 120 characters. Tables, pictures, headings and lists stay as they are."""
    if part.startswith(("|", "!", "#", "- ")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _links(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}](../bench/results/{name})" for name in names)


def _papers(found: Line) -> Iterator[str]:
    yield "## papers"
    yield (
        "**Claim.** The planner and the simulator reproduce what two papers measured, with a median error of at most "
        "20 %. They have one rate card for each of the papers' machines, and nothing is fitted."
    )
    heads = ["figures", "median error (bound: at most 20.0 %)", "mean error", "within 20 %", "largest error"]
    median = found["median_abs_error"]
    shown = f"{PERCENT.number(median)} %"
    cells = [
        COUNT.number(found["scored_rows"]),
        shown if _PAPERS_BOUND.holds(median) else f"**{shown}, missed**",
        f"{PERCENT.number(found['mean_abs_error'])} %",
        COUNT.number(found["rows_within_20_percent"]),
        f"{PERCENT.number(found['largest_abs_error'])} %",
    ]
    yield markdown_table(["hardware", *heads], [["simulated: the papers' machines", *cells]])
    yield "![our figure divided by the paper's, for each figure of both papers](images/results/papers.svg)"
    yield (
        "Single figures are up to two and a half times as large as the paper's. [Planning](planning.md) has the table "
        f"of all figures and the assumptions. Data: {_links(['papers.json'])}. Script: `bench/papers.py`."
    )


def _runbooks(found: Line) -> Iterator[str]:
    yield "## runbooks"
    yield (
        "**Claim.** An alert fires soon after its fault and reaches the daemon. Its runbook, followed word by word, "
        "solves the problem. There is no bound in numbers."
    )
    heads = ["alert", "fault", "until the alert", "until its end", "reached the daemon"]
    rows = [
        [
            f"`{record['alert']}`", record["fault"], f"{record['seconds_to_fire']:.1f} s",
            f"{record['seconds_to_resolve']:.1f} s", "yes" if record["told_the_daemon"] else "no",
        ]
        for record in found["records"]
    ]  # fmt: skip
    yield markdown_table(heads, rows)
    yield (
        f"One run on {found['machine']}; the device is emulated. The waiting times of the rules are divided by "
        f"{found['durations_divided_by']}, so in production they are that many times as long. When the daemon itself "
        f"is dead, no alert can reach it. Data: {_links(['runbooks.json'])}. Script: `bench/runbooks.py`."
    )


def _gpu(machines: Sequence[gpu.Gpu]) -> Iterator[str]:
    yield "## gpu"
    yield (
        "**Claim.** Tidegate trains on a GPU, and its weights equal those of the oracle bit for bit. The figures are "
        "real: nothing is emulated. [On a GPU](gpu.md) says what they mean."
    )
    heads = ["what", *(machine.name for machine in machines)]
    yield markdown_table(heads, ([what, *(cell(machine) for machine in machines)] for what, cell in gpu.ROWS))
    for machine in machines:
        yield from gpu.paragraphs(machine)


def _rest() -> Iterator[str]:
    yield "## Without a committed result"
    yield "\n".join(f"- `bench/{script}`: {why}." for script, why in UNCOMMITTED.items())
    yield "## Results that other pages explain"
    yield "\n".join(f"- [{name}](../bench/results/{name}): {what}." for name, what in ELSEWHERE.items())
