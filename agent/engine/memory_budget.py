"""Decides what fits in the device memory and the host memory of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.engine.engine_settings import EngineSettings
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.parameters.subgroups import Layout
from tidegate.errors import MemoryBudgetError
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import Processor, Residence
from tidegate.plan.placement import place_subgroups
from tidegate.plan.residency import GradientBudget


class MemoryBudget:
    """The memory budget of one engine: checks knobs, and computes the device memory that is left for gradients."""

    def __init__(self, memory: StateMemory, settings: EngineSettings) -> None:
        self._memory, self._settings = memory, settings

    @property
    def gradients(self) -> GradientBudget:
        """Limits of the device memory for released gradients."""
        settings = self._settings
        return GradientBudget(
            self._memory.device.capacity_bytes - settings.headroom_bytes, settings.gradient_memory_bytes
        )

    def gradient_room(self, processors: Sequence[Processor], after: Sequence[Residence]) -> int:
        """Bytes of device memory that gradients may take until the update has used them. In mode `keep` this is the
        size of all gradients, because the framework owns their memory.

        processors, after: processor, and residence after the step, of each subgroup.
        """
        layouts = self._memory.layouts
        if self._settings.gradients == "keep":
            return sum(layout.numel * layout.format.grad_bytes for layout in layouts)
        weights = sum(layout.numel * layout.format.weight_bytes for layout in layouts)
        return self.gradients.room_bytes(weights + sum(self._memory.state_bytes_on_device(processors, after)))

    def check_device(self, effective: EffectiveKnobs, headroom_bytes: int, more: Sequence[Layout] = ()) -> None:
        """Raises MemoryBudgetError, with figures, if weights, gradients, slots and residents do not fit on the device
        with these knobs.

        headroom_bytes: device memory that must stay free. more: subgroups to be added.
        """
        memory, layouts = self._memory, [*self._memory.layouts, *more]
        placed = place_subgroups(len(layouts), stride=effective.stride, static_ratio=effective.static_ratio)
        after = [lives for _, lives in placed]
        residents, slots = memory.state_bytes_on_device([processor for processor, _ in placed], after, more)
        available = memory.device.capacity_bytes - self._weight_and_gradient_bytes(layouts) - headroom_bytes
        if residents + slots > available:
            sizes = [s.numel * s.format.state_bytes for s in layouts]
            share = max(0.0, (available - slots) / sum(sizes))
            wanted = sum(size for size, lives in zip(sizes, after, strict=True) if lives == "device")
            first = " Lower static_ratio with stride=off first, then set stride." if residents > wanted else ""
            raise MemoryBudgetError(
                f"static_ratio={effective.static_ratio:g} does not fit the device: residents need {residents:,} bytes "
                f"and {self._settings.num_slots} slots {slots:,}, but {max(available, 0):,} of "
                f"{memory.device.capacity_bytes:,} bytes are left for state. static_ratio up to {share:.2f} fits."
                f"{first}",
                residents + slots, available,
            )  # fmt: skip

    def _weight_and_gradient_bytes(self, layouts: Sequence[Layout]) -> int:
        """Device memory of weights and gradients during a backward. Released gradients are gone when they were used: a
        backward needs room for the gradient of the largest parameter."""
        weights = sum(layout.numel * layout.format.weight_bytes for layout in layouts)
        if self._settings.gradients == "keep":
            return weights + sum(layout.numel * layout.format.grad_bytes for layout in layouts)
        return weights + _largest_gradient_bytes(layouts)

    def check_host(self, cache_bytes: int) -> None:
        """Raises MemoryBudgetError, with figures, if host slots and a host cache of `cache_bytes` do not fit in host
        memory."""
        memory, slots = self._memory, self._memory.num_host_slots
        state = sum(layout.numel * layout.format.state_bytes for layout in memory.layouts)
        needed = memory.host_slot_bytes() + min(cache_bytes, state)
        available = host_available_bytes() + sum(memory.host_bytes().values())
        if needed > available:
            raise MemoryBudgetError(
                f"host_cache={cache_bytes:,} bytes does not fit in host memory: with {slots} host slots {needed:,} "
                f"bytes are needed, {available:,} are available. Lower host_cache, use smaller subgroups or fewer "
                "host_slots.",
                needed, available,
            )  # fmt: skip


def _largest_gradient_bytes(layouts: Iterable[Layout]) -> int:
    """Size in bytes of the largest gradient of a parameter, in the dtype of the gradient. `layouts` must have all
    subgroups of each parameter."""
    nbytes = Counter[int]()
    for layout in layouts:
        for segment in layout.segments:
            nbytes[segment.param] += segment.numel * layout.format.grad_bytes
    return max(nbytes.values(), default=0)
