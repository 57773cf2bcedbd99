"""Runs DeepSpeed's own tests of optimizer offload, checkpoints and `safe_get_…` on its CPU accelerator with Tidegate in
every ZeRO-3 engine; what fails then runs once more as it is.

    python -m tests.conformance.deepspeed_own --tests DIR [--only REGEX] [--seconds 280] [--report FILE]

DIR is the `tests` folder of a checkout of deepspeedai/DeepSpeed at the version that is installed; nothing of it is kept
here, and it is copied before anything is put into it. What has an outcome is in `--log` and is not run again: with
`--seconds` it can be run in pieces. `docs/conformance.md` says what came out and why.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.conformance import deepspeed_plugin as plugin
from tests.conformance import deepspeed_rank as rank
from tests.conformance.deepspeed_report import write_report

ROOT = Path(__file__).parents[2]
MODES = ("tidegate", "stock")
RANKS = 4
SECONDS_PER_TEST = 150
FILES = {
    "checkpoint/test_zero_optimizer.py": "not Elastic",
    "runtime/zero/test_zero_tensor_fragment.py": "cpu or nvme",
    "runtime/zero/test_zero_offloadpp.py": "",
    "runtime/zero/test_nvme_checkpointing.py": "",
    "runtime/zero/test_zero_grad_clip.py": "",
    "v1/zero/test_zero.py": "ffload or ToFP32 or LargeParam or Unbalanced or Frozen or EmptyParameterGroup or Base",
    "checkpoint/test_universal_checkpoint.py": "",
    "checkpoint/test_lr_scheduler.py": "",
    "checkpoint/test_convert_checkpoint.py": "",
    "v1/zero/test_zero_user_backward.py": "Offload",
    "v1/zero/test_zero_coalesce_grad_reduction.py": "Zero3",
    "v1/zero/test_offload_states.py": "Zero3 and False-False-False",
}
"""Below tests/unit, and which of their tests, as pytest's `-k` says it. Of the parameters that change nothing for an
optimizer (pinning, non-blocking copies) one choice is enough, each test being made with several ranks and engines."""

IN_RANKS = {
    "common.py": "deepspeed_rank.in_rank(DistributedExec)\nreduce_boolean_flags = deepspeed_rank.flags_of_ranks",
    "checkpoint/common.py": "compare_model_states = deepspeed_rank.with_whole_state(compare_model_states)\n"
    "compare_optimizer_states = deepspeed_rank.with_whole_state(compare_optimizer_states)",
    "v1/zero/test_zero_user_backward.py": "DDP = deepspeed_rank.without_device_ids(DDP)",
}
"""What is put at the end of their modules."""


def prepared(tests: Path, into: Path) -> Path:
    """A copy of DeepSpeed's tests, whose ranks take our plugin. Without DeepSpeed beside it: the installed one runs."""
    copy = into / "deepspeed_tests"
    shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    for file, more in IN_RANKS.items():
        with (copy / "unit" / file).open("a") as module:
            module.write(f"\n\nfrom tests.conformance import deepspeed_rank\n\n{more}\n")
    return copy


def run_file(file: str, which: str, mode: str, copy: Path, options: argparse.Namespace) -> None:
    """Runs pytest until each test of the file has an outcome, or time is up. A test that stands still is ended."""
    known = -1
    while time.time() < options.until and (count := len(list(outcomes(options.log)))) > known:
        known = count
        command = [
            *[sys.executable, "-m", "pytest", "-q", "-c", str(copy / "pytest.ini"), "-p", "no:cacheprovider"],
            *["-p", "tests.conformance.deepspeed_plugin", "-m", "not nightly", "--basetemp", str(copy / "made")],
            *["-W", "ignore", str(copy / "unit" / file), "-k", which],
        ]
        searched = [str(ROOT), str(copy), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ, plugin.LOG: str(options.log), rank.MODE: mode, rank.NOTES: str(copy / "notes"),
            plugin.UNTIL: str(options.until), "PYTHONPATH": os.pathsep.join(filter(None, searched)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONWARNINGS": "ignore",
            "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        (copy / "notes").touch()
        with (copy / "output").open("w") as output:
            running = subprocess.Popen(
                command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            stuck = _waited(running, options.log)
        if stuck:
            _stuck(options.log, mode, copy / "notes")
        elif running.returncode not in (0, 1, 2, 5):
            print((copy / "output").read_text()[-3000:], file=sys.stderr)
        if not stuck:
            break


def _waited(running: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether it had to be killed, with its ranks, as nothing came out of it for `SECONDS_PER_TEST`."""
    stuck, size, since = False, -1, time.monotonic()
    while running.poll() is None:
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        if time.monotonic() - since > SECONDS_PER_TEST:
            stuck = True
            break
        time.sleep(0.2)
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    return stuck


def _stuck(log: Path, mode: str, notes: Path) -> None:
    last = json.loads(log.read_text().splitlines()[-1])
    if last.get("begun"):
        outcome = {
            "mode": mode, "test": last["test"], "outcome": "failed", "seconds": SECONDS_PER_TEST,
            "message": f"not done in {SECONDS_PER_TEST} s", **plugin.told_by_ranks(notes),
        }  # fmt: skip
        with log.open("a") as lines:
            lines.write(json.dumps(outcome) + "\n")


def outcomes(log: Path) -> Iterator[dict[str, object]]:
    return (line for line in map(json.loads, log.read_text().splitlines()) if "outcome" in line)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=os.environ.get("TIDEGATE_DEEPSPEED_TESTS"))
    parser.add_argument("--file", action="append", help="below tests/unit, in place of those that are known here")
    parser.add_argument("-k", help="only tests that this expression of pytest's fits, in place of those known here")
    parser.add_argument("--mode", choices=MODES, action="append", help="with Tidegate or without; both if not given")
    parser.add_argument("--log", type=Path, default=Path("deepspeed-own-tests.log"), help="outcomes, to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no test after this long")
    parser.add_argument("--source", default="unknown", help="the commit that the tests are of, for the report")
    parser.add_argument("--report", type=Path, help="write what is in the log in short, as JSON lines")
    options = parser.parse_args(arguments)
    options.until = time.time() + options.seconds
    options.log = options.log.resolve()
    options.log.touch()
    if options.tests is not None:
        with tempfile.TemporaryDirectory(prefix="deepspeed-own-") as folder:
            copy = prepared(options.tests, Path(folder))
            for file in options.file or FILES:
                for mode in options.mode or MODES:
                    which = FILES.get(file, "") if options.k is None else options.k
                    run_file(file, which, mode, copy, options)
    elif options.report is None:
        parser.error("give --tests or --report")
    if options.report is not None:
        return write_report(list(outcomes(options.log)), options.source, options.report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
