"""Where every byte of optimizer state is: host state, mirrors of weights, gradient buffers, slots, residents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Copy, Device
from tidegate.agent.subgroups import Layout
from tidegate.errors import MemoryBudgetError
from tidegate.kernels import WeightFormat
from tidegate.plan.ops import D2H, H2D, Residence
from tidegate.plan.placement import place

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Addresses of the three arrays in one block of state; `aux` is 0 when the format has none."""

    exp_avg: int
    exp_avg_sq: int
    aux: int


def state_addresses(layout: Layout, block: int) -> StateAddresses:
    n = layout.numel
    return StateAddresses(block, block + 4 * n, block + 8 * n if layout.format.aux_bytes else 0)


class StateMemory:
    """Owns the memory of all subgroups. `residence`, `mirror_valid` say what is true between steps.

    `slot_gradients`: slots have room for a gradient that was spilled, behind that for the state.
    """

    def __init__(self, device: Device, layouts: Sequence[Layout], num_slots: int, slot_gradients: bool = False) -> None:
        self.device = device
        self.layouts: list[Layout] = []
        self.residence: list[Residence] = []
        self.mirror_valid: list[bool] = []
        self._state: dict[int, torch.Tensor] = {}
        self._mirror: dict[int, torch.Tensor] = {}
        self._gradient: dict[int, torch.Tensor] = {}
        self._resident: dict[int, int] = {}
        self.slots: list[int] = []
        self._num_slots = num_slots
        self._slot_gradients = slot_gradients
        self.extend(layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """More subgroups, behind those that are there."""
        for layout in layouts:
            self._state[layout.id] = self.device.host_buffer(layout.numel * layout.format.state_bytes)
        self.layouts += layouts
        self.residence += ["host"] * len(layouts)
        self.mirror_valid += [False] * len(layouts)
        self._free_slots()

    def _free_slots(self) -> None:
        for slot in self.slots:
            self.device.free(slot)
        self.slots.clear()

    # ---- addresses

    def host_state(self, subgroup: int) -> int:
        return self._state[subgroup].data_ptr()

    def mirror(self, subgroup: int) -> int:
        return self._mirror[subgroup].data_ptr()

    def gradient(self, subgroup: int) -> int:
        return self._gradient[subgroup].data_ptr()

    def on_device(self, subgroup: int, slot: int | None) -> int:
        return self._resident[subgroup] if slot is None else self.slots[slot]

    def slot_gradient(self, slot: int) -> int:
        return self.slots[slot] + self._slot_sizes(self.layouts)[0]

    # ---- what a placement needs

    def spilled(self, placed: Sequence[tuple[str, Residence]], room_bytes: int) -> list[bool]:
        """Whose gradient must wait on the host: those staged for the device that `room_bytes` hold no more, last ones
        first. Residents' gradients stay, and count."""
        found = [False] * len(self.layouts)
        staged: list[int] = []
        for layout, (processor, lives) in zip(self.layouts, placed, strict=True):
            if processor == "device" and lives == self.residence[layout.id] == "host":
                staged.append(layout.id)
            elif processor == "device":
                room_bytes -= layout.numel * layout.format.grad_bytes
        for s in staged:
            room_bytes -= self.layouts[s].numel * self.layouts[s].format.grad_bytes
            found[s] = room_bytes < 0
        return found

    def state_bytes_on_device(
        self, placed: Sequence[tuple[str, Residence]], more: Sequence[Layout] = ()
    ) -> tuple[int, int]:
        """What residents and slots take while a step runs that ends with these placements.

        Residents that leave do so after their last update on the device: for one step old and new ones need room.
        """
        layouts = [*self.layouts, *more]
        residents = sum(
            s.numel * s.format.state_bytes for s, (_, lives) in zip(layouts, placed, strict=True)
            if lives == "device" or s.id in self._resident
        )  # fmt: skip
        staged = any(where == ("device", "host") for where in placed)
        slots = self._num_slots * sum(self._slot_sizes(layouts)) if staged or self.slots else 0
        return residents, slots

    def _slot_sizes(self, layouts: Sequence[Layout]) -> tuple[int, int]:
        """Bytes of a slot for state and, behind it, for a gradient."""
        state = max((s.numel * s.format.state_bytes for s in layouts), default=0)
        grad = max((s.numel * s.format.grad_bytes for s in layouts), default=0)
        return -(-state // ALIGNMENT) * ALIGNMENT, grad if self._slot_gradients else 0

    def prepare(self, processors: Sequence[str], after: Sequence[Residence], spilled: Sequence[bool]) -> None:
        """Makes room for a step: mirrors and gradient buffers of the CPU's, slots, residents' places, host state."""
        for layout, processor, lives, spills in zip(self.layouts, processors, after, spilled, strict=True):
            s = layout.id
            if processor == "cpu" and s not in self._mirror:
                self._mirror[s] = self.device.host_buffer(layout.numel * layout.format.weight_bytes)
                self.mirror_valid[s] = False
            if (processor == "cpu" or spills) and s not in self._gradient:
                self._gradient[s] = self.device.host_buffer(layout.numel * layout.format.grad_bytes)
            if lives == "device" and s not in self._resident:
                self._resident[s] = self.device.alloc(layout.numel * layout.format.state_bytes)
            if s not in self._state and not (lives == "device" and self.residence[s] == "device"):
                self._state[s] = self.device.host_buffer(layout.numel * layout.format.state_bytes)
            staged = processor == "device" and lives == "host" and self.residence[s] == "host"
            while staged and len(self.slots) < self._num_slots:
                self.slots.append(self.device.alloc(sum(self._slot_sizes(self.layouts))))

    def commit(self, processors: Sequence[str], after: Sequence[Residence], spilled: Sequence[bool]) -> None:
        """The step is done: releases what its placement no longer needs."""
        for layout, processor, lives, spills in zip(self.layouts, processors, after, spilled, strict=True):
            s = layout.id
            self.residence[s] = lives
            if lives == "device":
                self._state.pop(s, None)
            elif s in self._resident:
                self.device.free(self._resident.pop(s))
            self.mirror_valid[s] = processor == "cpu"
            if processor == "device":
                self._mirror.pop(s, None)
                if not spills:
                    self._gradient.pop(s, None)

    def pull(self, subgroup: int) -> None:
        """Brings the state of a resident to the host, as for a checkpoint; it stays resident."""
        layout = self.layouts[subgroup]
        if self.residence[subgroup] == "device":
            nbytes = layout.numel * layout.format.state_bytes
            self._state.setdefault(subgroup, self.device.host_buffer(nbytes))
            copy = Copy(self._state[subgroup].data_ptr(), self._resident[subgroup], nbytes)
            self.device.copy(D2H, [copy]).wait()

    def push(self, subgroup: int) -> None:
        """Brings state that was pulled, and may have been changed, back to a resident's place."""
        if self.residence[subgroup] == "device":
            state = self._state.pop(subgroup)
            self.device.copy(H2D, [Copy(self._resident[subgroup], state.data_ptr(), state.numel())]).wait()

    @contextmanager
    def on_host(self, subgroup: int) -> Iterator[dict[str, torch.Tensor]]:
        """The state of a subgroup as named arrays that may be read and written; a resident goes back afterwards.

        `remainder` (int16) or `master` (fp32) is there for 16-bit weights.
        """
        self.pull(subgroup)
        layout, block = self.layouts[subgroup], self._state[subgroup]
        n = layout.numel
        arrays = {"exp_avg": block[: 4 * n].view(torch.float32), "exp_avg_sq": block[4 * n : 8 * n].view(torch.float32)}
        if layout.format.weight == WeightFormat.BF16_REMAINDER:
            arrays["remainder"] = block[8 * n :].view(torch.int16)
        elif layout.format.aux_bytes:
            arrays["master"] = block[8 * n :].view(torch.float32)
        try:
            yield arrays
        finally:
            self.push(subgroup)

    def drop_residents(self) -> None:
        """All state is on the host again (after `pull` of each, or because it is about to be replaced)."""
        for s, address in self._resident.items():
            self.device.free(address)
            self.residence[s] = "host"
        self._resident.clear()

    def reset_aux(self, subgroup: int, start: int, weights: torch.Tensor) -> None:
        """The weights from `start` on were set by the user: their remainder is 0, their fp32 master is the weight."""
        with self.on_host(subgroup) as arrays:
            if "remainder" in arrays:
                arrays["remainder"][start : start + weights.numel()] = 0
            if "master" in arrays:
                arrays["master"][start : start + weights.numel()] = weights.float()

    def host_bytes(self) -> dict[str, int]:
        """Host memory by kind."""
        kinds = {"state": self._state, "mirror": self._mirror, "gradient": self._gradient}
        return {kind: sum(t.numel() for t in tensors.values()) for kind, tensors in kinds.items()}

    def check_fits(
        self, stride: float | str, static_ratio: float, reserved_bytes: int, more: Sequence[Layout] = ()
    ) -> None:
        """MemoryBudgetError with figures when slots and residents of these knobs exceed what the device has left.

        `reserved_bytes`: what weights, gradients and headroom need.
        """
        layouts = [*self.layouts, *more]
        placed = place(len(layouts), stride=stride, static_ratio=static_ratio)  # type: ignore[arg-type]
        residents, slots = self.state_bytes_on_device(placed, more)
        available = self.device.capacity_bytes - reserved_bytes
        if residents + slots > available:
            sizes = [s.numel * s.format.state_bytes for s in layouts]
            share = max(0.0, (available - slots) / sum(sizes))
            after = sum(size for size, (_, lives) in zip(sizes, placed, strict=True) if lives == "device")
            first = " Lower static_ratio with stride=off first, then set stride." if residents > after else ""
            raise MemoryBudgetError(
                f"static_ratio={static_ratio:g} does not fit the device: residents need {residents:,} bytes and "
                f"{self._num_slots} slots {slots:,}, but {max(available, 0):,} of {self.device.capacity_bytes:,} bytes "
                f"are left for state. static_ratio up to {share:.2f} fits.{first}",
                residents + slots, available,
            )  # fmt: skip

    def close(self) -> None:
        self.drop_residents()
        self._free_slots()
        for buffers in (self._state, self._mirror, self._gradient):
            buffers.clear()
