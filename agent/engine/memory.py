"""Memory of the optimizer state: host buffers (state, copies of weights called mirrors, gradients), staging slots
(buffers for one subgroup during its update), residents (state that stays on the device), and the storage path of each
subgroup whose state is not in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.devices.base import Copy, Device
from tidegate.agent.engine.buffers import GradientBuffer, HostBuffers
from tidegate.agent.engine.state_block import state_arrays, state_buffer_bytes
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import NoPathLeft
from tidegate.kernels import WeightFormat
from tidegate.plan import Placement, Plan
from tidegate.plan.deferral import gradient_memory
from tidegate.plan.ops import D2H, H2D, BufferId, Processor, Residence, is_path
from tidegate.plan.slot_sizes import WEIGHT_SLOTS, device_slot_bytes, host_slot_bytes, weight_slot_bytes


class StateMemory:
    """Owns the memory of all subgroups. Between steps, `residence` tells where the state of each subgroup is, and
    `mirror_valid` whether the mirror of its weight in host memory equals the weight.

    num_slots: number of staging slots on the device.
    slot_gradients: whether each staging slot on the device also has room for a spilled gradient, behind the room for
        the state.
    store: the storage paths; None without paths.
    host_slots: number of staging slots in host memory by path.
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
        self.num_host_slots = sum((host_slots or {}).values())
        self.weight_slots: list[torch.Tensor] = []
        """Slots in host memory for weights; used only with paths."""
        self.layouts: list[Layout] = []
        self.residence: list[Residence] = []
        self.mirror_valid: list[bool] = []
        self._state, self._mirror, self._gradient = (HostBuffers(device.host_buffer) for _ in range(3))
        self._host_buffers = {"host_state": self._state, "host_weight": self._mirror, "host_grad": self._gradient}
        self._all_gradients: GradientBuffer | None = None
        """With storage paths in gradient mode `release`: the gradients of all subgroups. `_gradient` is then empty."""
        if store is not None and slot_gradients:
            self._all_gradients = GradientBuffer(device.host_buffer)
            del self._host_buffers["host_grad"]
        self._resident: dict[int, int] = {}
        self._allocated_ahead: set[int] = set()
        """Subgroups for whose state `stage` has allocated device memory that no plan uses yet."""
        self._kept_on_host: set[int] = set()
        """Subgroups whose state is kept in host memory because all paths failed in this step."""
        self.slots: list[int] = []
        self._num_slots = num_slots
        self._slot_gradients = slot_gradients
        self.extend(layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Appends subgroups; their state is zeros."""
        for layout in layouts:
            if self.store is None:
                self._state.allocate_zeros(layout.id, state_buffer_bytes(layout))
        self.layouts += layouts
        self.residence += ["host"] * len(layouts)
        self.mirror_valid += [False] * len(layouts)
        sizes = [layout.subgroup() for layout in self.layouts]
        self._device_slot_bytes = device_slot_bytes(sizes, gradients=self._slot_gradients)
        self._host_slot_bytes = host_slot_bytes(sizes, gradients=not self._slot_gradients)
        self._weight_slot_bytes = weight_slot_bytes(sizes)
        state, weight, _ = self._host_slot_bytes
        # Where state, weight and gradient begin in a host slot, in bytes.
        self._in_host_slot = {"host_slot": 0, "host_slot_weight": state, "host_slot_grad": state + weight}
        self._free_slots()
        self.host_slots.clear()
        self.weight_slots.clear()

    def _free_slots(self) -> None:
        for slot in self.slots:
            self.device.free(slot)
        self.slots.clear()

    def place_new_subgroups(self, residences: Sequence[Residence]) -> None:
        """With storage paths: gives each subgroup that has no state yet a state of zeros, in host memory or on a path.

        residences: the residence of each subgroup, by id.
        """
        assert self.store is not None
        for layout in self.layouts:
            s, lives = layout.id, residences[layout.id]
            if self.residence[s] == "host" and s not in self._state:
                if is_path(lives):
                    self.store.reserve(s, lives)
                    self.residence[s] = lives
                else:
                    self._state.allocate_zeros(s, state_buffer_bytes(layout))

    # ---- addresses

    def on_host(self, place: BufferId) -> int:
        """The address of a buffer in host memory. `place`: kind of the buffer, and number of its subgroup or host slot,
        as in `Op.host_state`, `Op.host_weight` and `Op.host_grad`."""
        kind, number = place
        if self._all_gradients is not None and kind in GradientBuffer.KINDS:
            return self._all_gradients.address(kind, number)
        buffers = self._host_buffers.get(kind)
        if buffers is not None:
            return buffers[number].data_ptr()
        if kind == "weight_slot":
            return self.weight_slots[number].data_ptr()
        return self.host_slots[number].data_ptr() + self._in_host_slot[kind]

    def on_device(self, subgroup: int, slot: int | None) -> int:
        """The device address of a subgroup's state: in this staging slot, or of the resident if `slot` is None."""
        return self._resident[subgroup] if slot is None else self.slots[slot]

    def slot_gradient(self, slot: int) -> int:
        """The device address of the room for a spilled gradient in this slot."""
        return self.slots[slot] + self._device_slot_bytes[0]

    # ---- memory that placements need

    def state_bytes_on_device(
        self, processors: Sequence[Processor], after: Sequence[Residence], more: Sequence[Layout] = ()
    ) -> tuple[int, int]:
        """Device bytes of residents and of slots during a step that ends with these placements.

        Residents that leave the device do so after their last update there: for one step, old and new residents both
        need room.

        processors, after: processor, and residence after the step, of each subgroup. more: subgroups to be added.
        """
        layouts = [*self.layouts, *more]
        residents = sum(
            s.numel * s.format.state_bytes for s, lives in zip(layouts, after, strict=True)
            if lives == "device" or (s.id in self._resident and s.id not in self._allocated_ahead)
        )  # fmt: skip
        staged = any(p == "device" and lives != "device" for p, lives in zip(processors, after, strict=True))
        sizes = [layout.subgroup() for layout in layouts]
        slot = device_slot_bytes(sizes, gradients=self._slot_gradients) if staged or self.slots else (0, 0)
        return residents, self._num_slots * sum(slot)

    def stage(self, placements: Sequence[Placement]) -> None:
        """Allocates memory of the next step: weight mirrors, gradient buffers on the host, staging slots, residents
        and, in a run without storage paths, host buffers for state. Frees residents that were allocated for a plan that
        is no longer wanted."""
        self._stage(placements)
        if self._all_gradients is not None:
            sizes = [layout.subgroup() for layout in self.layouts]
            self._all_gradients.resize(gradient_memory(sizes, placements, range(len(sizes))).nbytes)

    def _stage(self, placements: Sequence[Placement]) -> None:
        for s in [s for s in self._allocated_ahead if placements[s].after != "device"]:
            self._allocated_ahead.discard(s)
            self.device.free(self._resident.pop(s))
        for layout, placed in zip(self.layouts, placements, strict=True):
            s = layout.id
            if placed.leaves_mirror and s not in self._mirror:
                self._mirror.allocate(s, layout.numel * layout.format.weight_bytes)
            if self._all_gradients is None and placed.has_gradient_buffer and s not in self._gradient:
                self._gradient.allocate(s, layout.numel * layout.format.grad_bytes)
            while placed.is_staged and len(self.slots) < self._num_slots:
                self.slots.append(self.device.alloc(sum(self._device_slot_bytes)))
            while placed.weight_in_slot and len(self.weight_slots) < WEIGHT_SLOTS:
                self.weight_slots.append(self.device.host_buffer(self._weight_slot_bytes))
            while placed.uses_host_slot and len(self.host_slots) < self.num_host_slots:
                self.host_slots.append(self.device.host_buffer(sum(self._host_slot_bytes)))
            if placed.after == "device" and s not in self._resident:
                self._resident[s] = self.device.alloc(layout.numel * layout.format.state_bytes)
                self._allocated_ahead.add(s)
            if self.store is None and placed.after == "host" and s not in self._state:
                self._state.allocate(s, state_buffer_bytes(layout))

    def prepare(self, plan: Plan) -> None:
        """Allocates all memory of a step: the memory that `stage` allocates, and host buffers for state. Reserves space
        on paths for the state that will be stored there."""
        placements = plan.placements
        self._stage(placements)
        if self._all_gradients is not None:
            self._all_gradients.lay_out(plan)
        self._allocated_ahead.clear()
        for layout, placed in zip(self.layouts, placements, strict=True):
            s = layout.id
            if "host" in (placed.before, placed.after) and s not in self._state:
                self._state.allocate(s, state_buffer_bytes(layout))
            if is_path(placed.after) and self.store is not None:
                self.store.reserve(s, placed.after)

    def commit(self, placements: Sequence[Placement]) -> None:
        """To be called after a step: records where the state of each subgroup is, and releases the memory that is no
        longer needed with these placements."""
        for buffers in self._kinds.values():
            buffers.free_released()  # this step did not reuse them
        for layout, placed in zip(self.layouts, placements, strict=True):
            s = layout.id
            lives = self.residence[s] = self._actual_residence(s, placed.after)
            if lives != "host":
                self._state.release(s)
            if lives != "device" and s in self._resident:
                self.device.free(self._resident.pop(s))
            if self.store is not None and lives != "host":  # what is cached keeps its place on its path
                self.store.remove_other_copies(s, lives)
            self.mirror_valid[s] = placed.leaves_mirror
            if not self.mirror_valid[s]:
                self._mirror.release(s)
            if not placed.has_gradient_buffer:
                self._gradient.release(s)

    def _actual_residence(self, subgroup: int, planned: Residence) -> Residence:
        """The residence of the subgroup's state after a step: the planned one. If that path has failed, the path to
        which the state was flushed instead, or host memory if no path accepted it."""
        if self.store is None or not is_path(planned):
            return planned
        if subgroup in self._kept_on_host:
            self._kept_on_host.discard(subgroup)
            return "host"
        return self.store.flushed_to(subgroup)

    def keep_on_host(self, subgroup: int, place: BufferId) -> bool:
        """Makes the state in the host buffer `place` stay in host memory after this step, because no path accepts it.
        If the buffer is a host slot, the state is copied out of it. Returns False, with nothing done, if there is no
        host memory for the copy."""
        layout, nbytes = self.layouts[subgroup], state_buffer_bytes(self.layouts[subgroup])
        if place != ("host_state", subgroup):
            if nbytes > host_available_bytes():
                return False
            address = self.on_host(place)
            self._state.allocate_zeros(subgroup, nbytes)
            ctypes.memmove(self._state[subgroup].data_ptr(), address, layout.numel * layout.format.state_bytes)
        self._kept_on_host.add(subgroup)
        return True

    def forget_stored(self) -> None:
        """Discards all state on paths, because it will be replaced: it counts as zeros from now on and is not read.
        Does nothing without paths. State on a retired path has no place until `place_new_subgroups` is called."""
        self._kept_on_host.clear()
        for layout in self.layouts:
            s, lives = layout.id, self.residence[layout.id]
            if self.store is None:
                continue
            self.store.forget(s)
            if is_path(lives):
                self._state.pop(s, None)
                if lives in self.store.retired:
                    self.residence[s] = "host"

    def _load_to_host(self, subgroup: int) -> None:
        """Copies the state of a subgroup to host memory, from wherever it is; its residence stays the same."""
        layout, lives = self.layouts[subgroup], self.residence[subgroup]
        if lives == "host":
            return
        if subgroup not in self._state:
            self._state.allocate_zeros(subgroup, state_buffer_bytes(layout))
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

    def _store_back(self, subgroup: int, changed: bool) -> None:
        """Undoes `_load_to_host`: writes the state back to its residence if it was changed, and drops the copy in host
        memory."""
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
            except NoPathLeft:  # no path accepts the state: it stays in host memory
                self._state[subgroup], self.residence[subgroup] = state, "host"
            else:
                self.residence[subgroup] = self.store.flushed_to(subgroup)

    @contextmanager
    def arrays(self, subgroup: int, changed: bool = True) -> Iterator[dict[str, torch.Tensor]]:
        """Context manager that gives the state of a subgroup as named arrays: the tensors of the update rule and,
        for 16-bit weights, `remainder` (int16) or `master` (fp32).

        changed: whether the block may write to the arrays. The state is then written back to its residence at the end.
        """
        self._load_to_host(subgroup)
        layout = self.layouts[subgroup]
        try:
            yield state_arrays(self._state[subgroup], layout.numel, layout.format)
        finally:
            self._store_back(subgroup, changed)

    def drop_residents(self) -> None:
        """Frees the memory of residents on the device and sets their residence to host memory. Their state must be in
        host memory already, or will be replaced."""
        for s, address in self._resident.items():
            self.device.free(address)
            self.residence[s] = "host"
        self._resident.clear()
        self._allocated_ahead.clear()

    def reset_aux(self, subgroup: int, start: int, weights: torch.Tensor, where_changed: bool = False) -> None:
        """Sets remainders to 0, or fp32 masters to the weights, for elements whose weights were set by the user.

        start: position of the first of these elements in the subgroup.
        weights: the present weights of these elements.
        where_changed: resets only masters that do not round to their weight; all other masters and all remainders stay.
        """
        form = self.layouts[subgroup].format.weight
        if form == WeightFormat.BF16_REMAINDER and (where_changed or self._is_never_written(subgroup)):
            return
        with self.arrays(subgroup) as arrays:
            if "remainder" in arrays:
                arrays["remainder"][start : start + weights.numel()] = 0
            if "master" in arrays:
                master, weight = arrays["master"][start : start + weights.numel()], weights.detach().cpu()
                changed = weight.float()
                if where_changed:
                    changed = torch.where(master.to(weight.dtype) == weight, master, changed)
                master.copy_(changed)

    def _is_never_written(self, subgroup: int) -> bool:
        """Whether the state was assigned to a path and never written: it is all zeros, and needs no reading."""
        lives = self.residence[subgroup]
        return self.store is not None and is_path(lives) and self.store.paths[lives].states[subgroup].step < 0

    @property
    def _kinds(self) -> dict[str, HostBuffers]:
        return {"state": self._state, "mirror": self._mirror, "gradient": self._gradient}

    def host_bytes(self) -> dict[str, int]:
        """Bytes of allocated host memory by kind: `state`, `mirror` (of weights), `gradient` and, if there are paths,
        `slot` (staging slots and weight slots)."""
        by_kind = {kind: buffers.nbytes for kind, buffers in self._kinds.items()}
        if self._all_gradients is not None:
            by_kind["gradient"] = self._all_gradients.nbytes
        if self.store is not None:
            by_kind["slot"] = sum(slot.numel() for slot in (*self.host_slots, *self.weight_slots))
        return by_kind

    def host_slot_bytes(self) -> int:
        """Bytes of all staging slots and weight slots in host memory, which are allocated in runs with paths."""
        return self.num_host_slots * sum(self._host_slot_bytes) + WEIGHT_SLOTS * self._weight_slot_bytes

    def close(self) -> None:
        """Frees all memory on the device and on the host."""
        self.drop_residents()
        self._free_slots()
        self.host_slots.clear()
        self.weight_slots.clear()
        if self._all_gradients is not None:
            self._all_gradients.resize(0)
        for buffers in self._kinds.values():
            buffers.clear()
