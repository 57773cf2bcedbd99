"""A training with Tidegate, with state on storage paths. The device is emulated without pacing."""

from __future__ import annotations

import os
import time
from itertools import combinations
from typing import Any

from storage.figures import bytes_between, overlap
from storage.side import Model

UNPACED = 1e15
"""Rate of an emulated device without pacing, in bytes or parameters per second: no lane waits artificially."""


class Ours:
    """A training of linear layers with Tidegate in this process.

    offload: arguments of `tidegate.Offload`; the values of `paths` are dicts with the fields of `PathSettings`.
    lock_directory: folder for lock files of paths; another folder for each training, so that they do not wait for each
    other.
    """

    def __init__(
        self, *, model: Model, offload: dict[str, Any], lock_directory: str, threads: int, max_grad_norm: float = 1.0
    ) -> None:
        os.environ["XDG_RUNTIME_DIR"] = lock_directory
        import torch

        import tidegate
        from tidegate.agent.devices.emulated import EmulatedRates
        from tidegate.agent.tiers.file_path import PathSettings

        torch.manual_seed(0)
        torch.set_num_threads(threads)
        dtype = getattr(torch, model.dtype)
        linear = [torch.nn.Linear(model.width, model.width, bias=False, dtype=dtype) for _ in range(model.layers)]
        self._net = torch.nn.Sequential(*linear)
        self._x = torch.randn(model.batch, model.width, dtype=dtype)
        paths = {name: PathSettings(**one) for name, one in offload["paths"].items()}
        rates = EmulatedRates(
            h2d_bytes_per_second=UNPACED, d2h_bytes_per_second=UNPACED, update_params_per_second=UNPACED
        )
        settings = tidegate.Offload(**{**offload, "paths": paths}, device="emulated", emulated=rates)
        self._optimizer = tidegate.AdamW(self._net.parameters(), lr=1e-4, max_grad_norm=max_grad_norm, offload=settings)
        self._optimizer.observers.append(self._observe)
        self._result: Any = None

    def _observe(self, result: Any, phases: Any) -> None:
        self._result = result

    def forward(self) -> None:
        self._loss = self._net(self._x).float().pow(2).mean()

    def backward(self) -> None:
        self._loss.backward()

    def update(self) -> None:
        begin = time.monotonic()
        self._optimizer.step()
        self._window = begin, time.monotonic()
        self._optimizer.zero_grad()

    def told(self, backward_began: float) -> dict[str, Any]:
        from tidegate.plan.ops import OpKind
        from tidegate.timeline.stall_analysis import busy_seconds

        self._optimizer.wait()
        spans = self._result.spans
        moved = [s for s in spans if s.kind in (OpKind.FETCH, OpKind.FLUSH) and s.nbytes]
        kinds = (OpKind.FETCH, OpKind.CPU_UPDATE, OpKind.FLUSH)
        groups = {kind.name.lower(): [s for s in spans if s.kind is kind] for kind in kinds}
        busy = {name: busy_seconds(group) for name, group in groups.items()}
        fetched = [s for s in moved if s.kind is OpKind.FETCH]
        in_step = bytes_between(moved, *self._window)
        pairs = {f"{one}+{other}": overlap(groups[one], groups[other]) for one, other in combinations(groups, 2)}
        return {
            "state_bytes": sum(s.nbytes for s in moved),
            "bytes_in_step": in_step,
            "read_share_in_step": bytes_between(fetched, *self._window) / max(1.0, in_step),
            "seconds_in_step": self._window[1] - self._window[0],
            "disk_busy": busy_seconds(moved, self._window) / (self._window[1] - self._window[0]),
            "busy_seconds": busy,
            "overlap": overlap(*groups.values()),
            "simulated_overlap": self._simulated_overlap(backward_began, kinds),
            "overlap_of_pairs": pairs,
            "operation_seconds": [s.seconds for s in moved],
            "split": self._optimizer.effective_knobs()["tier_split"],
            "speeds": {name: vars(speeds) for name, speeds in self._optimizer.engine.store.speeds.items()},
            "host_bytes": self._optimizer.engine.memory.host_bytes(),
        }

    def _simulated_overlap(self, backward_began: float, kinds: tuple[Any, ...]) -> float:
        """The overlap of the same plan in the simulator, where lanes hand over at once: each op takes as long as it
        took, gradients arrive and `step()` is called when they did."""
        from tidegate.plan.ops import GATE_OF
        from tidegate.simulator.simulate import simulate
        from tidegate.speeds.rate_card import RateCard

        result = self._result
        spans = result.spans[result.num_dropped :]
        took = {span.op: span.seconds for span in spans}
        arrived = {s.subgroup: s.start - backward_began for s in spans if GATE_OF.get(s.kind) == "gradient"}
        simulated = simulate(
            result.plan, RateCard(), step_at=self._window[0] - backward_began, gradient_ready=arrived,
            durations=lambda op: took[op.id],
        )  # fmt: skip
        return overlap(*([s for s in simulated.spans if s.kind is kind] for kind in kinds))

    def close(self) -> None:
        self._optimizer.close()
