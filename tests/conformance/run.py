"""Runs torch's own optimizer tests, and torchao's offload parity tests, with ours in the place of theirs.

    python -m tests.conformance.run --pytorch DIR --torchao DIR [--json] [--only REGEX] [-v]

DIR are checkouts of pytorch/pytorch (at the version that is installed) and pytorch/ao; nothing of them is kept here.
Every test runs twice: with ours, and with torch's own class under the same substitution. What the control fails too
says nothing of ours and is counted apart. `docs/conformance.md` says what came out and why.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.conformance import substitutes
from tests.conformance.reasons import reason
from tests.conformance.substitutes import OPTIONS, SUPPORTED, Watch, option_of

SECONDS_PER_TEST = 120
COUNTED = ("passed", "failed", "skipped", "fails_with_torch_too")
INPUTS = "_get_optim_inputs_including_global_cliquey_kwargs"


@dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str
    """passed, failed or skipped."""
    message: str = ""


class Recorder(unittest.TestResult):
    """The outcome of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.message = "passed", ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self.failed(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self.failed(err)

    def failed(self, err: Any) -> None:
        text = str(err[1]).replace("\\n", "\n").split("To execute this test")[0].strip()
        self.outcome, self.message = "failed", f"{err[0].__name__}: {text}"

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        if self.outcome == "passed":
            self.outcome, self.message = "skipped", reason


def run_one(case: unittest.TestCase) -> Recorder:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {SECONDS_PER_TEST} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_PER_TEST)
    result = Recorder()
    try:
        case.run(result)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return result


def load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cases(module: types.ModuleType, name: str, only: re.Pattern[str]) -> Iterator[unittest.TestCase]:
    cls = getattr(module, name, None)
    if cls is None:
        return
    loader = unittest.TestLoader()
    for method in loader.getTestCaseNames(cls):
        if only.search(method):
            yield cls(method)


def optimizer_tests(root: Path, make: substitutes.Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/test_optim.py: each test with the configurations that ours has too, then with each option on its own."""
    watch = Watch()
    classes = make(watch)
    found: list[Outcome] = []
    with substitutes.in_optim_db(classes), _searched(root / "test"):
        module = load(root / "test" / "test_optim.py", f"conformance_optim_{make.__name__}")
        for case in cases(module, "TestOptimRenewedCPU", only):
            watch.reference = next((i for i in ("foreach", "fused") if f"{i}_matches_forloop" in case.id()), None)
            parts = _each_error() if case._testMethodName.startswith("test_errors") else _each_option(module)
            for part, narrowed in parts:
                watch.attempts, watch.options = 0, set()
                with narrowed:
                    result = run_one(type(case)(case._testMethodName))
                if part not in OPTIONS or part in watch.options:
                    found.append(_outcome(f"{case._testMethodName}[{part}]", result, watch))
    return found


def scheduler_tests(root: Path, make: substitutes.Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/optim/test_lrscheduler.py: what builds SGD, Adam or AdamW gets the substitute."""
    return _whole_module(root / "test" / "optim" / "test_lrscheduler.py", "TestLRScheduler", make, only)


def differentiable_tests(root: Path, make: substitutes.Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/optim/test_optim.py: the tests of Adam and AdamW that differentiate through a step."""
    wanted = re.compile(r"^test_adamw?(_|$)")
    return _whole_module(root / "test" / "optim" / "test_optim.py", "TestDifferentiableOptimizer", make, only, wanted)


def _whole_module(
    path: Path, name: str, make: substitutes.Classes, only: re.Pattern[str], wanted: re.Pattern[str] | None = None
) -> list[Outcome]:
    watch = Watch()
    found: list[Outcome] = []
    with substitutes.in_torch_optim(make(watch)), _searched(path.parent.parent):
        module = load(path, f"conformance_{path.stem}_{make.__name__}")
        for case in cases(module, name, only):
            if wanted is not None and not wanted.search(case._testMethodName):
                continue
            watch.attempts, watch.options = 0, set()
            result = run_one(case)
            found.append(_outcome(f"{name}.{case._testMethodName}", result, watch))
    return found


def torchao_tests(root: Path, make: substitutes.Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/test_low_bit_optim.py: the parity and save/load tests of CPUOffloadOptimizer, on the CPU."""
    watch = Watch()
    ours = make(watch)["AdamW"]

    class Offload(ours):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, optimizer_class: Any = None, *, offload_gradients: bool = False) -> None:
            if offload_gradients and make is substitutes.classes_of_tidegate:
                raise NotImplementedError("gradients are kept: there is no mode that frees them as they are copied")
            super().__init__(params)

    with _searched(root):
        module = load(root / "test" / "test_low_bit_optim.py", f"conformance_torchao_{make.__name__}")
    module.optim = types.SimpleNamespace(CPUOffloadOptimizer=Offload)  # type: ignore[attr-defined]
    found: list[Outcome] = []
    for case in cases(module, "TestOptim", re.compile("cpu_offload")):
        if only.search(case._testMethodName):
            watch.attempts = 0
            found.append(_outcome(case._testMethodName, run_one(case), watch))
    return found


def _outcome(test: str, result: Recorder, watch: Watch) -> Outcome:
    if result.outcome == "passed" and not watch.attempts:
        return Outcome(test, "skipped", "builds no Adam or AdamW")
    return Outcome(test, result.outcome, result.message)


@contextmanager
def _searched(path: Path) -> Iterator[None]:
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))


def _each_option(module: types.ModuleType) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Which configurations a test loops over: those that ours has too, then one option of torch's at a time."""
    for option in (SUPPORTED, *OPTIONS):
        yield option, _only_option(module, option)


def _each_error() -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """One misuse at a time: the test would stop at the first that ours answers otherwise."""
    from torch.testing._internal.common_optimizers import optim_db

    asked = optim_db[0].optim_error_inputs_func("cpu", torch.float32)
    seen: dict[str, int] = {}
    for number, error in enumerate(asked):
        desc = error.optimizer_error_input.desc
        seen[desc] = seen.get(desc, 0) + 1
        yield desc if seen[desc] == 1 else f"{desc}, {seen[desc]}", _only_error(number)


@contextmanager
def _only_error(number: int) -> Iterator[None]:
    from torch.testing._internal.common_optimizers import optim_db

    own = [info.optim_error_inputs_func for info in optim_db]

    def narrowed(inputs: Any) -> Any:
        return lambda *args, **kwargs: [inputs(*args, **kwargs)[number]]

    for info, inputs in zip(optim_db, own, strict=True):
        info.optim_error_inputs_func = narrowed(inputs)
    try:
        yield
    finally:
        for info, inputs in zip(optim_db, own, strict=True):
            info.optim_error_inputs_func = inputs


@contextmanager
def _only_option(module: types.ModuleType, option: str) -> Iterator[None]:
    """Configurations that are not of this option are left out of what the tests loop over."""
    from torch.testing._internal.common_optimizers import optim_db

    base = SUPPORTED if option == "differentiable" else option
    every = getattr(module, INPUTS)
    own = [info.optim_inputs_func for info in optim_db]

    def narrowed(inputs: Any) -> Any:
        return lambda *args, **kwargs: [i for i in inputs(*args, **kwargs) if option_of(i.kwargs) == base]

    for info, inputs in zip(optim_db, own, strict=True):
        info.optim_inputs_func = narrowed(inputs)
    setattr(module, INPUTS, lambda *a, **k: [i for i in every(*a, **k) if option_of(i.kwargs) == option])
    try:
        yield
    finally:
        setattr(module, INPUTS, every)
        for info, inputs in zip(optim_db, own, strict=True):
            info.optim_inputs_func = inputs


SUITES = {
    "test_optim": optimizer_tests,
    "test_lrscheduler": scheduler_tests,
    "differentiable": differentiable_tests,
    "torchao": torchao_tests,
}


def compare(suite: str, root: Path, only: re.Pattern[str]) -> dict[str, Any]:
    """Runs a suite with ours and with torch's own; the control decides what counts."""
    run = SUITES[suite]
    control = {o.test: o for o in run(root, substitutes.classes_of_torch, only)}
    counts = dict.fromkeys(COUNTED, 0)
    failures: list[dict[str, str]] = []
    passes: list[str] = []
    for ours in map(_not_hollow, run(root, substitutes.classes_of_tidegate, only)):
        theirs = control.get(ours.test)
        if ours.outcome == "failed" and theirs is not None and theirs.outcome == "failed":
            counts["fails_with_torch_too"] += 1
            continue
        counts[ours.outcome] += 1
        if ours.outcome == "passed":
            passes.append(ours.test)
        if ours.outcome == "failed":
            kind, why = reason(ours.test, ours.message)
            failures.append({"test": ours.test, "kind": kind, "why": why, "message": ours.message[:300]})
    return {**counts, "failures": failures, "passes": passes, "control": [asdict(o) for o in control.values()]}


def _not_hollow(ours: Outcome) -> Outcome:
    """A pass with an option that ours does not have means that it was taken and ignored."""
    if ours.outcome == "passed" and ours.test.endswith(tuple(f"[{option}]" for option in OPTIONS)):
        return Outcome(ours.test, "failed", "the option was accepted and ignored")
    return ours


def commit_of(root: Path) -> str:
    """The commit of a checkout; of a bare export, what a file SOURCE_COMMIT beside it says."""
    if (root / "SOURCE_COMMIT").exists():
        return (root / "SOURCE_COMMIT").read_text().strip()
    asked = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch", type=Path, default=os.environ.get("TIDEGATE_PYTORCH_SOURCE"))
    parser.add_argument("--torchao", type=Path, default=os.environ.get("TIDEGATE_TORCHAO_SOURCE"))
    parser.add_argument("--only", default="", help="regular expression on names of tests")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("-v", "--verbose", action="store_true", help="name the tests that pass, too")
    asked = parser.parse_args()
    if asked.pytorch is None and asked.torchao is None:
        parser.error("--pytorch or --torchao is needed: a checkout whose tests are to be run.")
    faulthandler.enable()
    # Tests count the warnings that they provoke; what they do not catch is not shown.
    warnings.simplefilter("always")
    warnings.showwarning = lambda *_args, **_kwargs: None
    only = re.compile(asked.only)
    total: dict[str, Any] = {"torch_version": torch.__version__, "passed": 0, "failed": 0, "skipped": 0}
    total |= {"fails_with_torch_too": 0, "suites": {}, "failures": []}
    for suite in SUITES:
        root = asked.torchao if suite == "torchao" else asked.pytorch
        if root is None:
            continue
        found = compare(suite, Path(root).resolve(), only)
        _show(suite, found, asked.verbose)
        counts = {key: found[key] for key in COUNTED}
        if suite == "torchao":
            total["torchao"] = {"source_commit": commit_of(Path(root)), **counts}
        else:
            total["source_commit"] = commit_of(Path(root))
            total["suites"][suite] = counts
            for key, number in counts.items():
                total[key] += number
        total["failures"] += found["failures"]
    if asked.json:
        print(json.dumps(total))
    return 1 if any(f["kind"] == "defect" for f in total["failures"]) else 0


def _show(suite: str, found: dict[str, Any], verbose: bool) -> None:
    print(
        f"{suite}: {found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped; "
        f"{found['fails_with_torch_too']} fail with torch's own too"
    )
    if verbose:
        for test in found["passes"]:
            print(f"  passed   {test}")
        for outcome in found["control"]:
            if outcome["outcome"] == "failed":
                print(f"  control {outcome['test']}: {outcome['message'][:200]!r}")
    groups: dict[tuple[str, str], list[str]] = {}
    for failure in found["failures"]:
        groups.setdefault((failure["kind"], failure["why"]), []).append(failure["test"])
    for (kind, why), tests in sorted(groups.items()):
        print(f"  {kind}: {why} ({len(tests)})")
        for test in tests if verbose or kind == "defect" else tests[:1]:
            print(f"    {test}")


if __name__ == "__main__":
    sys.exit(main())
