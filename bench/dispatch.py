"""Claim: to hand an op to its lane and to note its end takes at most 10 us.

The ops do nothing. `free`: 300 ops on four lanes, without dependencies, so that each lane always has ops that may
begin. `chain`: each op waits for the one before it, on another lane. Both are wall time divided by the number of ops,
medians of rounds that take turns. The ops have tasks, which lanes run without the interpreter, as updates on the CPU
and transfers from and to files have. `free_in_python` and `chain_in_python`: the same without tasks, by a runner in
Python, as copies of gradients and ops on a GPU are run.

`handover`: time from a thread to another one and back through two pipes, divided by two; the threads are of two
processes, so that no interpreter lock is in the way.

`loop_slowed_by`: how much longer a loop in Python takes in the main thread while another thread repeats the plan
without dependencies in the lanes. `loop_slowed_by_python`: the same with ops in Python, whose lanes share the
interpreter with the loop, and with all of `start` and `finish`, which are Python.

`--before DIR` measures the code in another directory, such as a clone of an earlier commit, in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  (its import takes long, and must not be in the first round)

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.engine import executor as executor_module
from tidegate.agent.engine.executor import Executor
from tidegate.plan.ops import Op, OpKind
from tidegate.plan.plan import Plan

OPS, ROUNDS, TURNS = 300, 30, 3
KINDS = (OpKind.STATE_H2D, OpKind.STATE_D2H, OpKind.CPU_UPDATE, OpKind.DEVICE_UPDATE)
"""One for each lane."""
LOOP = 2_000_000
BOUND_MICROSECONDS = 10.0
"""Of an op; in a chain, on top of a hand-over between threads."""
LOOP_BOUND = 0.02
DONE = DoneEvent(0.0, 0.0)
IssuedOp: Any = vars(executor_module)["IssuedOp"]
"""Taken from the executor's module, because earlier commits (`--before`) define it there."""


class Nothing:
    """Op runner that does nothing."""

    def wait(self, lane: str, event: object) -> None: ...

    def run(self, op: Op, begun: Callable[[], None]) -> Any:
        return IssuedOp(DONE, 0, 0)


def plan(chain: bool) -> Plan:
    ops = [Op(i, KINDS[i % len(KINDS)], i, 0, 0, (i - 1,) if chain and i else ()) for i in range(OPS)]
    return Plan("interleaved", (), (), 2, tuple(ops))


def new_executor() -> Executor:
    clock = getattr(executor_module, "MonotonicClock", None)
    if clock is None and "clock" in Executor.__init__.__annotations__:  # the executor before the native dispatcher
        from tidegate.agent.engine.clock import MonotonicClock as clock  # type: ignore[import-not-found, no-redef]
    return Executor(Nothing(), *((clock(),) if clock is not None else ()))


def prepared(of: Plan) -> dict[int, Any]:
    """A task that does nothing for each op; empty for code that has no tasks."""
    if not hasattr(executor_module, "PreparedOp"):
        return {}
    from tidegate.kernels.dispatch import copy_task

    nothing = executor_module.PreparedOp(copy_task([], float("inf")))
    return {op.id: nothing for op in of.ops}


def microseconds(executor: Executor, of: Plan, ops: dict[int, Any]) -> float:
    began = time.perf_counter()
    executor.start(of, *((ops,) if ops else ()))
    executor.step()
    executor.finish()
    return (time.perf_counter() - began) / OPS * 1e6


def handover_microseconds(times: int = 2000) -> float:
    (there, to_child), (back, to_parent) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(times):
            os.write(to_parent, os.read(there, 1))
        os._exit(0)
    began = time.perf_counter()
    for _ in range(times):
        os.write(to_child, b"x")
        os.read(back, 1)
    seconds = time.perf_counter() - began
    os.waitpid(child, 0)
    for end in (there, to_child, back, to_parent):
        os.close(end)
    return seconds / times / 2 * 1e6


def loop_seconds() -> float:
    began = time.perf_counter()
    for _ in range(LOOP):
        pass
    return time.perf_counter() - began


def loop_slowed_by(repeat_once: Callable[[], object]) -> float:
    ratios = []
    for _ in range(5):
        alone, stop = loop_seconds(), threading.Event()

        def repeat(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                repeat_once()

        repeating = threading.Thread(target=repeat)
        repeating.start()
        ratios.append(loop_seconds() / alone - 1)
        stop.set()
        repeating.join()
    return statistics.median(ratios)


def repeated_in_lanes(executor: Executor, of: Plan) -> Callable[[], object]:
    """Runs the plan in the lanes, without the parts of `start` and `finish` that are Python: they are work of the
    training thread itself."""
    from tidegate.agent.engine.plan_execution import PlanExecution, program_of
    from tidegate.kernels.dispatch import Until

    lanes, program, tasks = executor._lanes, program_of(of, executor._names), PlanExecution(of).prepare(prepared(of))

    def once() -> None:
        lanes.start(program, tasks)
        lanes.wait(Until.DONE, [], 10.0)
        lanes.forget()

    return once


def one_turn() -> dict[str, float]:
    executor, plans = new_executor(), {"free": plan(chain=False), "chain": plan(chain=True)}
    tasks = {name: prepared(of) for name, of in plans.items()}
    found: dict[str, list[float]] = {
        "free": [], "chain": [], "free_in_python": [], "chain_in_python": [], "handover": []
    }  # fmt: skip
    for round_number in range(ROUNDS + 2):
        row = {name: microseconds(executor, of, tasks[name]) for name, of in plans.items()}
        row |= {f"{name}_in_python": microseconds(executor, of, {}) for name, of in plans.items()}
        if round_number >= 2:
            for name, value in row.items():
                found[name].append(value)
            if round_number % 6 == 0:
                found["handover"].append(handover_microseconds())
    result = {name: statistics.median(values) for name, values in found.items()}
    if tasks["free"]:
        result["loop_slowed_by"] = loop_slowed_by(repeated_in_lanes(executor, plans["free"]))
    result["loop_slowed_by_python"] = loop_slowed_by(lambda: microseconds(executor, plans["free"], {}))
    executor.close()
    return result


def turn_in(directory: Path) -> dict[str, float]:
    """One turn of the code in `directory`, with this script, in a process of its own."""
    python = directory / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), str(Path(__file__).resolve()), "--turn"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="directory with other code, whose .venv runs it")
    parser.add_argument("--turn", action="store_true", help="one turn only, for --before")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(one_turn()))
        return 0
    here = Path(__file__).resolve().parents[1]
    sides = {"now": here} | ({"before": options.before.resolve()} if options.before else {})
    turns: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for turn in range(TURNS):
        for side, directory in sides.items():
            turns[side].append(turn_in(directory))
            if not options.json:
                print(f"turn {turn + 1}, {side}: {turns[side][-1]}", file=sys.stderr)
    of = {side: {name: spread([turn[name] for turn in found]) for name in found[0]} for side, found in turns.items()}
    now = of["now"]
    chain, handover, slowed = (now[name]["median"] for name in ("chain", "handover", "loop_slowed_by"))
    good = (
        now["free"]["median"] <= BOUND_MICROSECONDS and chain <= handover + BOUND_MICROSECONDS and slowed <= LOOP_BOUND
    )
    print(json.dumps({
        "bench": "dispatch", "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "ops": OPS,
        "microseconds_per_op": now["free"]["median"], "bound": BOUND_MICROSECONDS,
        "microseconds_per_op_of_chain": now["chain"]["median"],
        "handover_microseconds": now["handover"]["median"], "ok": good, **of,
    }))  # fmt: skip
    return 0 if good else 1


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
