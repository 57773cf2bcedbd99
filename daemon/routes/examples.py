"""Examples of the most used messages, for the OpenAPI document. Each example is validated when it is created."""

from __future__ import annotations

from typing import Final

from tidegate.wire.agent import AgentHello, AgentReport, Applied, Directive, Lease, Vote
from tidegate.wire.base import Message
from tidegate.wire.canary import CanaryRequest, Rollback
from tidegate.wire.evidence import SubgroupSizes
from tidegate.wire.knobs import GenerationView, KnobPatch
from tidegate.wire.prediction import KnobPreview
from tidegate.wire.step import StepReport

_AT: Final = 1_700_000_000.0

EXAMPLES: Final[tuple[Message, ...]] = (
    KnobPatch(changes={"stride": 3}, reason="the update stalls on h2d", canary=CanaryRequest(steps=20)),
    Rollback(to=1, reason="slower since the change"),
    KnobPreview(
        run="llama-7b",
        generation=4,
        before={"stride": 2.0, "static_ratio": 0.0},
        after={"stride": 3.0, "static_ratio": 0.0},
        changed={"stride": 3.0},
        predicted_update_seconds_before=1.9,
        predicted_update_seconds_after=1.4,
    ),
    GenerationView(
        run="llama-7b",
        generation=5,
        state="applied",
        knobs={"stride": 3.0, "static_ratio": 0.0},
        changes={"stride": 3.0},
        author="ada@node-1 (operate)",
        reason="the update stalls on h2d",
        created_at=_AT,
        decided_at=_AT + 0.2,
        outcome="All 8 ranks said yes.",
        applied={0: 1200},
    ),
    AgentHello(
        agent="0f7c2a1e",
        run="llama-7b",
        rank=0,
        world_size=8,
        host="node-1",
        pid=4711,
        device_kind="cuda",
        metrics_address="node-1:9400",
        knobs={"stride": "auto", "static_ratio": 0.0},
        subgroups=(
            SubgroupSizes(
                numel=100_000_000, count=70, weight_bytes=200_000_000, grad_bytes=200_000_000, state_bytes=10**9
            ),
        ),
        started_at=_AT,
    ),
    AgentReport(
        timestamp=_AT,
        step=1200,
        phase="forward",
        generation=5,
        effective={"stride": 3.0, "static_ratio": 0.0},
        steps=(StepReport(step=1200, timestamp=_AT, phase_seconds={"forward": 1.1, "backward": 2.3, "update": 1.4}),),
    ),
    Vote(generation=5, can=False, reason="static_ratio=1 needs 9.0 GB of device memory, 4.0 GB are free"),
    Applied(generation=5, step=1200),
    Lease(lease_seconds=10.0, directive=Directive(committed=5, committed_knobs={"stride": 3.0, "static_ratio": 0.0})),
)
