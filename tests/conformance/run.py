"""Runs torch's own optimizer tests, and torchao's offload parity tests, with ours in the place of theirs.

    python -m tests.conformance.run --pytorch DIR --torchao DIR [--json] [--only REGEX] [-v]

DIR are checkouts of pytorch/pytorch (at the version that is installed) and pytorch/ao; nothing of them is kept here.
Every test runs twice: with ours, and with torch's own class under the same substitution. What the control fails too
says nothing of ours and is counted apart. `docs/conformance.md` says what came out and why.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.conformance.reasons import Kind, reason
from tests.conformance.substitutes import OPTIONS, classes_of_tidegate, classes_of_torch
from tests.conformance.suites import SUITES, Outcome
from tests.conformance.torch_internals import common_optimizers

COUNTED = ("passed", "failed", "skipped", "fails_with_torch_too")


@dataclass(frozen=True)
class Failure:
    test: str
    kind: Kind
    why: str
    message: str


@dataclass
class Report:
    """What came out of one suite."""

    suite: str
    source: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    failures: list[Failure] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    skips: dict[str, str] = field(default_factory=dict)
    control_failures: dict[str, str] = field(default_factory=dict)


def compare(suite: str, root: Path, only: re.Pattern[str]) -> Report:
    """Runs a suite with ours and with torch's own; the control decides what counts."""
    report = Report(suite, commit_of(root))
    control = {outcome.test: outcome for outcome in SUITES[suite](root, classes_of_torch, only)}
    for ours in map(_not_hollow, SUITES[suite](root, classes_of_tidegate, only)):
        theirs = control.get(ours.test)
        if ours.outcome == "failed" and theirs is not None and theirs.outcome == "failed":
            report.counts["fails_with_torch_too"] += 1
            report.control_failures[ours.test] = theirs.message
            continue
        report.counts[ours.outcome] += 1
        if ours.outcome == "passed":
            report.passes.append(ours.test)
        elif ours.outcome == "skipped":
            report.skips[ours.test] = ours.message
        else:
            report.failures.append(Failure(ours.test, *reason(ours.test, ours.message), message=ours.message[:300]))
    return report


def _not_hollow(ours: Outcome) -> Outcome:
    """A pass with an option that ours does not have means that it was taken and ignored."""
    if ours.outcome == "passed" and ours.test.endswith(tuple(f"[{option}]" for option in OPTIONS)):
        return Outcome(ours.test, "failed", "the option was accepted and ignored")
    return ours


def commit_of(root: Path) -> str:
    """The commit of a checkout; of files without a history, what SOURCE_COMMIT beside them says."""
    stated = root / "SOURCE_COMMIT"
    if stated.exists():
        return stated.read_text().strip()
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, default=os.environ.get("TIDEGATE_PYTORCH_SOURCE"))
    parser.add_argument("--torchao", type=Path, default=os.environ.get("TIDEGATE_TORCHAO_SOURCE"))
    parser.add_argument("--suite", choices=SUITES, action="append", help="only this one; can be given more than once")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="tests whose name has this pattern")
    parser.add_argument("--json", action="store_true", help="one object as the last line of output")
    parser.add_argument("-v", "--verbose", action="store_true", help="every test by name")
    asked = parser.parse_args()
    roots = {suite: asked.torchao if suite == "torchao" else asked.pytorch for suite in asked.suite or SUITES}
    if not any(roots.values()):
        parser.error("give --pytorch or --torchao")
    common_optimizers()
    faulthandler.enable()
    # Tests count the warnings that they provoke; what they do not catch is not shown.
    warnings.simplefilter("always")
    warnings.showwarning = lambda *_args, **_kwargs: None
    reports = [compare(suite, Path(root).resolve(), asked.only) for suite, root in roots.items() if root is not None]
    for report in reports:
        _show(report, asked.verbose)
    if asked.json:
        print(json.dumps({"torch": torch.__version__, "suites": [asdict(report) for report in reports]}))
    return 1 if any(failure.kind == "defect" for report in reports for failure in report.failures) else 0


def _show(report: Report, verbose: bool) -> None:
    counts = ", ".join(f"{report.counts[name]} {name.replace('_', ' ')}" for name in COUNTED)
    print(f"{report.suite} of {report.source}: {counts}")
    if verbose:
        for test in report.passes:
            print(f"  passed {test}")
        for heading, tests in (("skipped", report.skips), ("control", report.control_failures)):
            for test, message in tests.items():
                print(f"  {heading} {test}: {message[:200]!r}")
    groups: dict[tuple[Kind, str], list[str]] = {}
    for failure in report.failures:
        groups.setdefault((failure.kind, failure.why), []).append(failure.test)
    for (kind, why), names in sorted(groups.items()):
        print(f"  {kind}: {why} ({len(names)})")
        for test in names if verbose or kind == "defect" else names[:1]:
            print(f"    {test}")


if __name__ == "__main__":
    sys.exit(main())
