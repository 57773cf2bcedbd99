"""Detects edits of the weights by the user or another library. The edited weights count: stored state adapts to
them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.parameters.fingerprint import Fingerprints
from tidegate.agent.parameters.subgroups import Layout, flat
from tidegate.errors import ParameterError

WeightForm = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and strides of a weight."""


class WeightEdits:
    """Detects edits by address and version of each weight, and by samples of its elements for edits through `.data`.

    `params`: the list of the engine, which appends parameters to it.
    """

    def __init__(self, device: Device, memory: StateMemory, params: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._memory = memory
        self._params = params
        self._forms: list[WeightForm] = []
        self._places: list[torch.device] = []
        self._stamps: list[tuple[int, int]] = []
        self._samples = Fingerprints()
        self.extend(memory.layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Includes the parameters that were added with these subgroups."""
        self._places += [param.device for param in self._params[len(self._forms) :]]
        self._forms += [_form(param) for param in self._params[len(self._forms) :]]
        for layout in layouts:
            self._reset_aux(layout)
        self._take_reference()

    def update_began(self) -> None:
        """To be called when an update begins: the new versions of the weights are not edits."""
        self._stamps = [self._stamp(i) for i in range(len(self._params))]

    def update_ended(self) -> None:
        """To be called when an update is done: later edits are found by comparison with the present weights."""
        self._samples.save_reference()

    def edited(self, by_data: bool = True) -> set[int]:
        """Numbers of the parameters that were changed since the last update, and not by an update.

        by_data: finds changes through `.data`, too, which on a GPU waits for the work that the framework has enqueued.
        """
        stamped = {i for i, before in enumerate(self._stamps) if before != self._stamp(i)}
        return stamped | self._samples.changed() if by_data else stamped

    def unchanged(self) -> set[int]:
        """Numbers of the parameters that hold the same bits as after the last update, also where the memory is another.
        A parameter of another dtype is not among them."""
        same = self._samples.unchanged_in(dict(enumerate(self._params)))
        return {
            i for i in same
            if _form(self._params[i]) == self._forms[i] and self._params[i]._version == self._stamps[i][1]
        }  # fmt: skip

    def adapt_to_edits(self, by_data: bool = True, reading: bool = False) -> None:
        """Adapts the stored state to edited weights: marks their mirrors for a new copy and resets their remainders to
        0 (and their fp32 masters to the weight). A weight that holds the same bits in other memory was moved, not
        edited: only its mirror is copied again.

        by_data: as in `edited`.
        reading: the state will only be read, and no update follows: the state of weights with another dtype is left
            unchanged.

        ParameterError when a weight has another dtype, shape or memory format than before: its state is in another
        order.
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
        """Resets remainders or fp32 masters of the weights in a subgroup (of the parameters in `only`, if given).

        `moved`: parameters whose samples are unchanged. Samples do not show an edit of another element: each master
        that does not round to its weight is reset, too.
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


def _form(param: torch.Tensor) -> WeightForm:
    return str(param.dtype).removeprefix("torch."), tuple(param.shape), param.stride()
