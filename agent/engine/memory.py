"""Where every byte of optimizer state is: host state, mirrors of weights, gradient buffers, slots, residents; and which
path holds what is not in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tidegate.agent.devices.base import Copy, Device
from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.engine.buffers import Buffers
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import MemoryBudgetError, NoPathLeft
from tidegate.kernels import WeightFormat
from tidegate.plan import Placement
from tidegate.plan.ops import D2H, H2D, Place, Residence, is_path
from tidegate.plan.placement import place

ALIGNMENT = 256
PAGE_BYTES = 4096
"""Host memory that goes to and from paths is whole pages."""


@dataclass(frozen=True, slots=True)
class StateAddresses:
    """Addresses of the three arrays in one block of state; `aux` is 0 when the format has none."""

    exp_avg: int
    exp_avg_sq: int
    aux: int


def state_addresses(layout: Layout, block: int) -> StateAddresses:
    n = layout.numel
    return StateAddresses(block, block + 4 * n, block + 8 * n if layout.format.aux_bytes else 0)


def state_arrays(block: torch.Tensor, numel: int, weight: WeightFormat) -> dict[str, torch.Tensor]:
    """The named arrays in one block of state, which is bytes."""
    n = numel
    arrays = {"exp_avg": block[: 4 * n].view(torch.float32), "exp_avg_sq": block[4 * n : 8 * n].view(torch.float32)}
    if weight == WeightFormat.BF16_REMAINDER:
        arrays["remainder"] = block[8 * n : 10 * n].view(torch.int16)
    elif weight.aux_bytes:
        arrays["master"] = block[8 * n : 12 * n].view(torch.float32)
    return arrays


class StateMemory:
    """Owns the memory of all subgroups. `residence`, `mirror_valid` say what is true between steps.

    `slot_gradients`: slots have room for a gradient that was spilled, behind that for the state. `store`: the paths;
    `host_slots`: how many staging slots in host memory each of them has.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[Layout],
        num_slots: int,
        slot_gradients: bool = False,
        store: TierStore | None = None,
        host_slots: Mapping[str, int] | None = None,
    ) -> None:
        self.device = device
        self.store = store
        self.host_slots: list[torch.Tensor] = []
        self._num_host_slots = sum((host_slots or {}).values())
        self.layouts: list[Layout] = []
        self.residence: list[Residence] = []
        self.mirror_valid: list[bool] = []
        self._state, self._mirror, self._gradient = (Buffers(device.host_buffer) for _ in range(3))
        self._resident: dict[int, int] = {}
        self._ahead: set[int] = set()
        """Subgroups that have a place on the device because knobs ask for it, and were in no plan with it yet."""
        self._kept: set[int] = set()
        """Subgroups that no path took in this step: host memory has their state."""
        self.slots: list[int] = []
        self._num_slots = num_slots
        self._slot_gradients = slot_gradients
        self.extend(layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """More subgroups, behind those that are there, with zeros for state."""
        for layout in layouts:
            if self.store is None:
                self._state.make(layout.id, _state_bytes(layout))
        self.layouts += layouts
        self.residence += ["host"] * len(layouts)
        self.mirror_valid += [False] * len(layouts)
        self._free_slots()
        self.host_slots.clear()

    def _free_slots(self) -> None:
        for slot in self.slots:
            self.device.free(slot)
        self.slots.clear()

    def settle(self, residences: Sequence[Residence]) -> None:
        """With paths: subgroups that have no state in memory yet begin where they will be kept, with zeros."""
        assert self.store is not None
        for layout in self.layouts:
            s, lives = layout.id, residences[layout.id]
            if self.residence[s] == "host" and s not in self._state:
                if is_path(lives):
                    self.store.reserve(s, lives)
                    self.residence[s] = lives
                else:
                    self._state.make(s, _state_bytes(layout))

    # ---- addresses

    def on_host(self, place: Place) -> int:
        """The address of a place of a plan (`Op.host_state`, `host_weight`, `host_grad`) in host memory."""
        kind, number = place
        if kind.startswith("host_slot"):
            state, weight, _ = self._host_slot_sizes()
            behind = {"host_slot": 0, "host_slot_weight": state, "host_slot_grad": state + weight}[kind]
            return self.host_slots[number].data_ptr() + behind
        return {"host_state": self._state, "host_weight": self._mirror, "host_grad": self._gradient}[kind][
            number
        ].data_ptr()

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
            if processor == "device" and "device" not in (lives, self.residence[layout.id]):
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
            if lives == "device" or (s.id in self._resident and s.id not in self._ahead)
        )  # fmt: skip
        staged = any(where == ("device", "host") for where in placed)
        slots = self._num_slots * sum(self._slot_sizes(layouts)) if staged or self.slots else 0
        return residents, slots

    def _slot_sizes(self, layouts: Sequence[Layout]) -> tuple[int, int]:
        """Bytes of a slot for state and, behind it, for a gradient."""
        state = max((s.numel * s.format.state_bytes for s in layouts), default=0)
        grad = max((s.numel * s.format.grad_bytes for s in layouts), default=0)
        return -(-state // ALIGNMENT) * ALIGNMENT, grad if self._slot_gradients else 0

    def _host_slot_sizes(self) -> tuple[int, int, int]:
        """Bytes of a host slot for state, weight and gradient, in this order, each of whole pages.

        Gradients that are released cannot wait for a host slot: they have buffers of their own.
        """
        grad = 0 if self._slot_gradients else max((s.numel * s.format.grad_bytes for s in self.layouts), default=0)
        return (
            _whole_pages(max((s.numel * s.format.state_bytes for s in self.layouts), default=0)),
            _whole_pages(max((s.numel * s.format.weight_bytes for s in self.layouts), default=0)),
            _whole_pages(grad),
        )

    def stage(self, placements: Sequence[Placement]) -> None:
        """Takes what the next step needs and no path has to be asked for: the CPU's mirrors and gradient buffers,
        slots, and places of residents. What was taken ahead of a plan that is wanted no more is given back."""
        for s in [s for s in self._ahead if placements[s].after != "device"]:
            self._ahead.discard(s)
            self.device.free(self._resident.pop(s))
        for layout, placed in zip(self.layouts, placements, strict=True):
            s, on_cpu = layout.id, placed.processor == "cpu"
            if on_cpu and not placed.uses_host_slot and s not in self._mirror:
                self._mirror.take(s, layout.numel * layout.format.weight_bytes)
            if (on_cpu or placed.spilled) and not placed.grad_in_slot and s not in self._gradient:
                self._gradient.take(s, layout.numel * layout.format.grad_bytes)
            while placed.is_staged and len(self.slots) < self._num_slots:
                self.slots.append(self.device.alloc(sum(self._slot_sizes(self.layouts))))
            while placed.uses_host_slot and len(self.host_slots) < self._num_host_slots:
                self.host_slots.append(self.device.host_buffer(sum(self._host_slot_sizes())))
            if placed.after == "device" and s not in self._resident:
                self._resident[s] = self.device.alloc(layout.numel * layout.format.state_bytes)
                self._ahead.add(s)
            if self.store is None and placed.after == "host" and s not in self._state:
                self._state.take(s, _state_bytes(layout))

    def prepare(self, placements: Sequence[Placement]) -> None:
        """Makes room for a step: what `stage` takes, host state, and space on the paths that state goes to."""
        self.stage(placements)
        self._ahead.clear()
        for layout, placed in zip(self.layouts, placements, strict=True):
            s = layout.id
            if "host" in (placed.before, placed.after) and s not in self._state:
                self._state.take(s, _state_bytes(layout))
            if is_path(placed.after) and self.store is not None:
                self.store.reserve(s, placed.after)

    def commit(self, placements: Sequence[Placement]) -> None:
        """The step is done: releases what its placement no longer needs."""
        for buffers in self._kinds.values():
            buffers.forget()  # this step had no use for it
        for layout, placed in zip(self.layouts, placements, strict=True):
            s = layout.id
            lives = self.residence[s] = self._really_after(s, placed.after)
            if lives != "host":
                self._state.let_go(s)
            if lives != "device" and s in self._resident:
                self.device.free(self._resident.pop(s))
            if self.store is not None and lives != "host":  # what is cached keeps its place on its path
                self.store.remove_other_copies(s, lives)
            self.mirror_valid[s] = placed.processor == "cpu" and not placed.uses_host_slot
            if not self.mirror_valid[s]:
                self._mirror.let_go(s)
            if placed.grad_in_slot or (placed.processor == "device" and not placed.spilled):
                self._gradient.let_go(s)

    def _really_after(self, subgroup: int, planned: Residence) -> Residence:
        """Where its state is after a step: where the plan said, unless a path failed."""
        if self.store is None or not is_path(planned):
            return planned
        if subgroup in self._kept:
            self._kept.discard(subgroup)
            return "host"
        return self.store.flushed_to(subgroup)

    def keep(self, subgroup: int, place: Place) -> bool:
        """The state at a place of a plan stays in host memory, as no path takes it. False when there is no room."""
        layout, nbytes = self.layouts[subgroup], _state_bytes(self.layouts[subgroup])
        if place != ("host_state", subgroup):
            if nbytes > host_available_bytes():
                return False
            address = self.on_host(place)
            self._state.make(subgroup, nbytes)
            ctypes.memmove(self._state[subgroup].data_ptr(), address, layout.numel * layout.format.state_bytes)
        self._kept.add(subgroup)
        return True

    def forget_stored(self) -> None:
        """All state is about to be replaced: what lies on paths is zeros from now on, unread. What a retired path had
        is nowhere, until `settle` gives it a place."""
        self._kept.clear()
        for layout in self.layouts:
            s, lives = layout.id, self.residence[layout.id]
            if self.store is None:
                continue
            self.store.forget(s)
            if is_path(lives):
                self._state.pop(s, None)
                if lives in self.store.retired:
                    self.residence[s] = "host"

    def _pull(self, subgroup: int) -> None:
        """Brings the state of a subgroup to host memory, whatever holds it; it goes on living there."""
        layout, lives = self.layouts[subgroup], self.residence[subgroup]
        if lives == "host":
            return
        if subgroup not in self._state:
            self._state.make(subgroup, _state_bytes(layout))
        address = self._state[subgroup].data_ptr()
        if lives == "device":
            nbytes = layout.numel * layout.format.state_bytes
            self.device.copy(D2H, [Copy(address, self._resident[subgroup], nbytes)]).wait()
        elif self.store is not None:
            try:
                self.store.fetch(lives, subgroup, address)
            except BaseException:
                del self._state[subgroup]
                raise

    def _push(self, subgroup: int, changed: bool) -> None:
        """What was pulled goes back to where it lives, if it was changed."""
        layout, lives = self.layouts[subgroup], self.residence[subgroup]
        if lives == "host":
            return
        state = self._state.pop(subgroup)
        if not changed:
            return
        if lives == "device":
            nbytes = layout.numel * layout.format.state_bytes
            self.device.copy(H2D, [Copy(self._resident[subgroup], state.data_ptr(), nbytes)]).wait()
        elif self.store is not None:
            try:
                self.store.flush(lives, subgroup, state.data_ptr())
            except NoPathLeft:  # it is in memory already
                self._state[subgroup], self.residence[subgroup] = state, "host"
            else:
                self.residence[subgroup] = self.store.flushed_to(subgroup)

    @contextmanager
    def arrays(self, subgroup: int, changed: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        """The state of a subgroup as named arrays; `changed`: what is written to them counts.

        `remainder` (int16) or `master` (fp32) is there for 16-bit weights.
        """
        self._pull(subgroup)
        layout = self.layouts[subgroup]
        try:
            yield state_arrays(self._state[subgroup], layout.numel, layout.format.weight)
        finally:
            self._push(subgroup, changed)

    def drop_residents(self) -> None:
        """All state is on the host again (after `pull` of each, or because it is about to be replaced)."""
        for s, address in self._resident.items():
            self.device.free(address)
            self.residence[s] = "host"
        self._resident.clear()
        self._ahead.clear()

    def reset_aux(self, subgroup: int, start: int, weights: torch.Tensor, where_changed: bool = False) -> None:
        """The weights from `start` on were set by the user: their remainder is 0, their fp32 master is the weight.

        where_changed: they are said to be as they were; a remainder stays, and so does a master that rounds to its
        weight.
        """
        form = self.layouts[subgroup].format.weight
        if form == WeightFormat.BF16_REMAINDER and (where_changed or self._is_all_zeros(subgroup)):
            return
        with self.arrays(subgroup) as arrays:
            if "remainder" in arrays:
                arrays["remainder"][start : start + weights.numel()] = 0
            if "master" in arrays:
                master, now = arrays["master"][start : start + weights.numel()], weights.detach().cpu()
                stays = (master.to(now.dtype) == now) if where_changed else False
                master.copy_(torch.where(torch.as_tensor(stays), master, now.float()))

    def _is_all_zeros(self, subgroup: int) -> bool:
        """It was never written since a path took it: bringing it to memory would be in vain."""
        lives = self.residence[subgroup]
        return self.store is not None and is_path(lives) and self.store.is_new(lives, subgroup)

    @property
    def _kinds(self) -> dict[str, Buffers]:
        return {"state": self._state, "mirror": self._mirror, "gradient": self._gradient}

    def host_bytes(self) -> dict[str, int]:
        """Host memory by kind."""
        found = {kind: buffers.nbytes for kind, buffers in self._kinds.items()}
        if self.store is not None:
            found["slot"] = sum(slot.numel() for slot in self.host_slots)
        return found

    def host_slot_bytes(self) -> int:
        """What all staging slots in host memory take while there is state on paths."""
        return self._num_host_slots * sum(self._host_slot_sizes())

    def check_host(self, cache_bytes: int) -> None:
        """MemoryBudgetError with figures when host slots and a cache of so many bytes do not fit in host memory."""
        needed = self.host_slot_bytes() + min(cache_bytes, sum(s.numel * s.format.state_bytes for s in self.layouts))
        available = host_available_bytes() + sum(self.host_bytes().values())
        if needed > available:
            raise MemoryBudgetError(
                f"host_cache={cache_bytes:,} bytes does not fit in host memory: with {self._num_host_slots} host slots "
                f"{needed:,} bytes are needed, {available:,} are available. Lower host_cache, use smaller subgroups or "
                "fewer host_slots.",
                needed, available,
            )  # fmt: skip

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
        self.host_slots.clear()
        for buffers in self._kinds.values():
            buffers.clear()


def _state_bytes(layout: Layout) -> int:
    """Of its buffer in host memory."""
    return _whole_pages(layout.numel * layout.format.state_bytes)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
