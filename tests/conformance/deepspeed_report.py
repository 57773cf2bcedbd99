"""What came out of DeepSpeed's own tests, in short: per file, and for each failure why."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Kind = Literal["by design", "not supported", "fails without Tidegate too", "defect"]
COUNTED = ("passed", "failed", "fails_without_too", "skipped", "no_engine")

RULES: tuple[tuple[str, str, Kind, str], ...] = (
    ("", r"zero_hpz_partition_size \(ZeRO", "not supported", "ZeRO++ is refused"),
    ("", r"optimizer is torch\.optim\.sgd\.SGD", "not supported", "SGD is refused: Adam and AdamW are what it takes"),
    ("", r'offload_param.device is "nvme"', "not supported", "offload_param to NVMe is refused"),
    ("", "offload_states cannot move the state", "not supported",
     "offload_states and reload_states are refused: static_ratio says how much state is on the device"),
    ("offload_states", "no attribute 'grad_partitions_flat_buffer'", "not supported",
     "offload_states and reload_states are refused; before them the test reads a buffer that runs with offload do not "
     "have"),
    ("LargeParam", "should only have one parameter group", "by design",
     "reads averaged_gradients, which runs with offload do not have; safe_get_full_grad has them"),
    (r"ParamPartitioningBase::test_zero_grad\[True\]", "AssertionError", "by design",
     "zero_grad() and then step() updates with zeros; DeepSpeed updates with the gradients that were dropped"),
)  # fmt: skip
"""What the test and its message must have in them, kind, reason."""


def write_report(outcomes: Sequence[Mapping[str, Any]], source: str, into: Path) -> int:
    """Writes JSON lines: what it ran on, then one object for each file. Prints counts and reasons. Returns 1 if
    something failed that no rule explains."""
    ours = {one["test"]: one for one in outcomes if one["mode"] == "tidegate"}
    stock = {one["test"]: one for one in outcomes if one["mode"] == "stock"}
    files: dict[str, dict[str, Any]] = {}
    for test, one in ours.items():
        file, _, name = test.partition("::")
        found = files.setdefault(file, {"file": file, "counts": dict.fromkeys(COUNTED, 0), "passed": [], "failed": {},
                                        "skipped": {}})  # fmt: skip
        kind = _sort(one, stock.get(test), name, found)
        found["counts"][kind] += 1
    header = {
        "tests_of": source, "platform": platform.platform(), "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("deepspeed", "torch", "pytest")},
    }  # fmt: skip
    into.write_text("".join(json.dumps(line) + "\n" for line in (header, *files.values())))
    for found in files.values():
        print(found["file"], ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in found["counts"].items()))
        for name, failure in found["failed"].items():
            print(f"  {failure['kind']}: {failure['why']}: {name}")
    return int(any(one["kind"] == "defect" for found in files.values() for one in found["failed"].values()))


def _sort(one: Mapping[str, Any], stock: Mapping[str, Any] | None, name: str, found: dict[str, Any]) -> str:
    """Puts an outcome where it belongs and says what it counts as."""
    if one["outcome"] == "skipped":
        found["skipped"][name] = one["message"].removeprefix("Skipped: ")
        return "skipped"
    if one["outcome"] == "passed":
        if not one["built"]:
            return "no_engine"
        found["passed"].append(name)
        return "passed"
    messages = [*one["said"], one["message"]]
    kind, why = reason(name, "\n".join(messages))
    if stock is not None and stock["outcome"] == "failed":
        kind, why = "fails without Tidegate too", _short([*stock["said"], stock["message"]][0])
    found["failed"][name] = {
        "kind": kind, "why": why, "message": _short(messages[0]),
        "without": None if stock is None else stock["outcome"],
    }  # fmt: skip
    return "fails_without_too" if kind == "fails without Tidegate too" else "failed"


def reason(test: str, message: str) -> tuple[Kind, str]:
    """Kind and reason. What no rule explains is a defect, of ours or of the rules."""
    for on_test, on_message, kind, why in RULES:
        if re.search(on_test, test) and re.search(on_message, message, re.DOTALL):
            return kind, why
    return "defect", _short(message)


def _short(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[0][:300] if lines else "no message"
