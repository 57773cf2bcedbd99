"""Decides which gradients are spilled: kept in host memory because the device has no room for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.agent.parameters.subgroups import Layout
from tidegate.plan.ops import Residence


def spilled_gradients(
    layouts: Sequence[Layout],
    residence: Sequence[Residence],
    placed: Sequence[tuple[str, Residence]],
    room_bytes: int,
) -> list[bool]:
    """Returns, for each subgroup, whether its gradient is spilled.

    Only gradients of subgroups whose state is copied to the device for the update are spilled, those of the last
    subgroups first. Gradients of residents stay on the device and use a part of `room_bytes`.

    layouts: the subgroups. residence: where the state of each subgroup is now. placed: processor and next residence of
    each subgroup. room_bytes: device memory for gradients that are not used yet.
    """
    spilled = [False] * len(layouts)
    staged: list[int] = []
    for layout, (processor, lives) in zip(layouts, placed, strict=True):
        if processor == "device" and "device" not in (lives, residence[layout.id]):
            staged.append(layout.id)
        elif processor == "device":
            room_bytes -= layout.numel * layout.format.grad_bytes
    for s in staged:
        room_bytes -= layouts[s].numel * layouts[s].format.grad_bytes
        spilled[s] = room_bytes < 0
    return spilled
