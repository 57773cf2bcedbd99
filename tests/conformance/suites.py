"""Torch's and torchao's test files, loaded from checkouts and run test by test with substitutes in them."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance import narrowing, substitutes
from tests.conformance.substitutes import OPTIONS, Classes, Watch

SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Outcome:
    test: str
    outcome: str
    """passed, failed or skipped."""
    message: str = ""


Suite = Callable[[Path, Classes, re.Pattern[str]], list[Outcome]]


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


def optimizer_tests(root: Path, make: Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/test_optim.py: each test with the configurations that ours has too, then with each refused option."""
    watch = Watch()
    classes = make(watch)
    found: list[Outcome] = []
    with substitutes.in_optim_db(classes), _searched(root / "test"):
        module = _load(root / "test" / "test_optim.py", f"conformance_optim_{make.__name__}")
        for case in _cases(module, "TestOptimRenewedCPU", only):
            name = case._testMethodName
            watch.reference = next((i for i in ("foreach", "fused") if f"{i}_matches_forloop" in name), None)
            parts = narrowing.each_error() if name.startswith("test_errors") else narrowing.each_option(module)
            for part, narrowed in parts:
                with narrowed, substitutes.in_torch_optim(classes, ("Adam", "AdamW")):
                    outcome = _run(type(case)(name), watch, f"{name}[{part}]")
                if part not in OPTIONS or part in watch.options:
                    found.append(outcome)
    return found


def scheduler_tests(root: Path, make: Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/optim/test_lrscheduler.py: what builds SGD, Adam or AdamW gets the substitute."""
    return _whole_module(root / "test" / "optim" / "test_lrscheduler.py", "TestLRScheduler", make, only)


def differentiable_tests(root: Path, make: Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/optim/test_optim.py: the tests of Adam and AdamW that differentiate through a step."""
    wanted = re.compile(r"^test_adamw?(_|$)")
    return _whole_module(
        root / "test" / "optim" / "test_optim.py", "TestDifferentiableOptimizer", make, only, wanted=wanted
    )


def torchao_tests(root: Path, make: Classes, only: re.Pattern[str]) -> list[Outcome]:
    """test/test_low_bit_optim.py: the parity and save/load tests of CPUOffloadOptimizer, on the CPU."""
    watch = Watch()
    with _searched(root):
        module = _load(root / "test" / "test_low_bit_optim.py", f"conformance_torchao_{make.__name__}")
    offloading = substitutes.cpu_offload(make(watch)["AdamW"])
    module.__dict__["optim"] = types.SimpleNamespace(CPUOffloadOptimizer=offloading)
    cases = [case for case in _cases(module, "TestOptim", only) if "cpu_offload" in case._testMethodName]
    return [_run(case, watch, case._testMethodName) for case in cases]


SUITES: Mapping[str, Suite] = {
    "test_optim": optimizer_tests,
    "test_lrscheduler": scheduler_tests,
    "differentiable": differentiable_tests,
    "torchao": torchao_tests,
}


def _whole_module(
    path: Path, name: str, make: Classes, only: re.Pattern[str], *, wanted: re.Pattern[str] = re.compile("")
) -> list[Outcome]:
    watch = Watch()
    with substitutes.in_torch_optim(make(watch)), _searched(path.parent.parent):
        module = _load(path, f"conformance_{path.stem}_{make.__name__}")
        cases = [case for case in _cases(module, name, only) if wanted.search(case._testMethodName)]
        return [_run(case, watch, f"{name}.{case._testMethodName}") for case in cases]


def _run(case: unittest.TestCase, watch: Watch, name: str) -> Outcome:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {SECONDS_PER_TEST} s")

    watch.begin()
    result = Recorder()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_PER_TEST)
    try:
        case.run(result)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if result.outcome == "passed" and not watch.attempts:
        return Outcome(name, "skipped", "builds no Adam or AdamW")
    return Outcome(name, result.outcome, result.message)


def _load(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"{path} is not there: is this a checkout?")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _cases(module: types.ModuleType, name: str, only: re.Pattern[str]) -> Iterator[unittest.TestCase]:
    cls = getattr(module, name, None)
    if cls is None:
        raise SystemExit(f"{module.__file__} has no {name}.")
    for method in unittest.TestLoader().getTestCaseNames(cls):
        if only.search(method):
            yield cls(method)


@contextmanager
def _searched(path: Path) -> Iterator[None]:
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
