"""What test_watchdog runs: it is stopped in an op, for longer than the watchdog allows, and goes on."""

from __future__ import annotations

import time

from tests.agent.engine.test_executor import scripted, small_plan
from tidegate.plan.ops import Op, OpKind

seconds: list[float] = []


def on(op: Op) -> None:
    if op.kind is OpKind.CPU_UPDATE and op.subgroup == 0:
        print("running", flush=True)
        began = time.monotonic()
        for _ in range(10):
            time.sleep(0.1)
        seconds.append(time.monotonic() - began)


executor = scripted(on, watchdog_seconds=2.5)
executor.start(small_plan())
executor.step()
executor.finish()
executor.close()
print("the op took", *seconds)
