"""Detects edits of the weights by the user or another library. Edited weights take precedence: the stored state is
adapted to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.parameters.fingerprint import Fingerprints
from tidegate.agent.parameters.shards import is_divided, shard_of
from tidegate.agent.parameters.subgroups import Layout, flat
from tidegate.errors import EngineError, ParameterError

WeightForm = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and strides of a weight."""


class WeightEdits:
    """Detects edited weights: by address and version of each weight and, because an edit through `.data` changes
    neither, by samples of its elements.

    whole: all parameters. `params`: this rank's shards of them. They are the engine's own lists and not copies:
        parameters that are added to the engine later are in them, too. A shard that FSDP2 has replaced is replaced in
        `params` before edits are looked for.
    """

    def __init__(
        self, device: Device, memory: StateMemory, whole: Sequence[torch.Tensor], params: list[torch.Tensor]
    ) -> None:
        self._device = device
        self._memory = memory
        self._whole, self._params = whole, params
        self._forms: list[WeightForm] = []
        self._places: list[torch.device] = []
        self._stamps: list[tuple[int, int]] = []
        self._samples = Fingerprints()
        self.extend(memory.layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Starts to check the parameters that were appended to `params`. `layouts`: their subgroups."""
        self._any_divided = any(map(is_divided, self._whole))
        self._places += [param.device for param in self._params[len(self._forms) :]]
        self._forms += [_form(param) for param in self._params[len(self._forms) :]]
        for layout in layouts:
            self._reset_aux(layout)
        self._take_reference()

    def update_began(self) -> None:
        """Records the present addresses and versions of the weights, so that the update does not count as an edit. To
        be called when an update begins."""
        self._stamps = [self._stamp(i) for i in range(len(self._params))]

    def update_ended(self) -> None:
        """Saves samples of the updated weights, to detect later edits. To be called when an update is done."""
        self._samples.save_reference()

    def edited(self, by_data: bool = True) -> set[int]:
        """Numbers of the parameters that were edited since the last update.

        by_data: also finds edits through `.data`. On a GPU this waits for the work that the framework has enqueued.
        """
        self._follow_replaced_shards()
        stamped = {i for i, before in enumerate(self._stamps) if before != self._stamp(i)}
        return stamped | self._samples.changed() if by_data else stamped

    def _follow_replaced_shards(self) -> None:
        """Replaces the shards in `params` by the present ones. Before pytorch's pull request 163130 (September 2025),
        FSDP2 gives a shard that is smaller than those of other ranks new memory, at the first forward and when it loads
        a state."""
        if self._any_divided:
            self._params[:] = [shard_of(whole) for whole in self._whole]

    def unchanged(self) -> set[int]:
        """Numbers of the parameters that hold the same bits as after the last update, as far as versions and samples
        show it, even if they are in other memory. Parameters with another dtype, shape or strides are not included."""
        same = self._samples.unchanged_in(dict(enumerate(self._params)))
        return {
            i for i in same
            if _form(self._params[i]) == self._forms[i] and self._params[i]._version == self._stamps[i][1]
        }  # fmt: skip

    def adapt_to_edits(self, by_data: bool = True, reading: bool = False) -> None:
        """Adapts the stored state to edited weights: marks the copies of these weights in host memory (mirrors) as
        outdated, and sets their remainders to 0 or their fp32 masters to the weight. A weight that holds the same bits
        in other memory was moved, not edited: only its mirror is copied again.

        by_data: also finds edits through `.data`. On a GPU this waits for the work that the framework has enqueued.
        reading: True if the state will only be read, without an update. The state of weights with another dtype is then
            left unchanged.

        Raises ParameterError if a weight has another dtype, shape or strides than before, because its stored state has
        the old format.
        """
        edited = self.edited(by_data)
        if reading:
            edited -= {i for i in edited if self._is_converted(i)}
        if not edited:
            return
        for index in edited:
            if _form(self._params[index]) != self._forms[index]:
                raise ParameterError(
                    f"Parameter {index} had dtype, shape and strides {self._forms[index]} when the optimizer was built "
                    f"and has {_form(self._params[index])} now. Convert it back, or convert the model before building "
                    "the optimizer."
                )
        moved = self.unchanged()
        for layout in self._memory.layouts:
            if any(segment.param in edited for segment in layout.segments):
                self._memory.mirror_valid[layout.id] = False
                self._reset_aux(layout, edited, moved)
        self._take_reference()

    def _is_converted(self, param: int) -> bool:
        """Whether this parameter has another dtype, with shape and strides unchanged."""
        was, now = self._forms[param], _form(self._params[param])
        return was[0] != now[0] and was[1:] == now[1:]

    def reset(self) -> None:
        """Takes the present weights as the reference, so that they do not count as edited. Marks all mirrors (weights
        in host memory) as outdated, and resets all remainders to 0 and all fp32 masters to the weights."""
        for layout in self._memory.layouts:
            self._memory.mirror_valid[layout.id] = False
            self._reset_aux(layout)
        self._take_reference()

    def _take_reference(self) -> None:
        """Registers the weights with the device, and takes their present versions and samples as the reference."""
        for param, place in zip(self._params, self._places, strict=True):
            if param.numel() and param.device == place:  # after a move, the memory is not of this device
                self._device.adopt(param)
        self.update_began()
        self._samples.set_tensors(dict(enumerate(self._params)))

    def _reset_aux(self, layout: Layout, only: set[int] | None = None, moved: Collection[int] = ()) -> None:
        """Sets the remainders of a subgroup to 0, or its fp32 masters to the present weights.

        only: numbers of the parameters for which this is done; None for all parameters.
        moved: numbers of parameters whose samples (see `Fingerprints`) are unchanged, although their address may have
            changed. Their remainders stay. Their masters stay, too, except where a master does not round to the weight:
            this element was edited.
        """
        if not layout.format.aux_bytes:
            return
        for segment in layout.segments:
            if only is None or segment.param in only:
                weights = flat(self._params[segment.param])[segment.offset : segment.offset + segment.numel]
                self._memory.reset_aux(layout.id, segment.start, weights, where_changed=segment.param in moved)

    def _stamp(self, param: int) -> tuple[int, int]:
        """Address and version of a parameter's weight."""
        weight = self._params[param]
        return weight.data_ptr(), weight._version


def refuse_edits(edited: Collection[int]) -> None:
    """Raises EngineError if any parameters were edited. To be called when their gradients are released already."""
    if edited:
        raise EngineError(
            f"Parameter {min(edited)} was edited between backward and step(), and its gradient is released already. "
            "Edit weights after step(), or use gradients='keep'."
        )


def _form(param: torch.Tensor) -> WeightForm:
    return str(param.dtype).removeprefix("torch."), tuple(param.shape), param.stride()
