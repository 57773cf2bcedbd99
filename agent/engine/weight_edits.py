"""The weights as the user sees them. They are authoritative: what was edited counts, whoever did it and however."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.parameters.fingerprint import Fingerprints
from tidegate.agent.parameters.subgroups import Layout, flat
from tidegate.errors import ParameterError

Form = tuple[str, tuple[int, ...], tuple[int, ...]]


class Weights:
    """Sees edits by address and version, and by samples where `.data` was used. `params` grows with the engine's."""

    def __init__(self, device: Device, memory: StateMemory, params: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._memory = memory
        self._params = params
        self._forms: list[Form] = []
        self._places: list[torch.device] = []
        self._stamps: list[tuple[int, int]] = []
        self._samples = Fingerprints()
        self.extend(memory.layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Parameters came with these subgroups."""
        self._places += [param.device for param in self._params[len(self._forms) :]]
        self._forms += [_form(param) for param in self._params[len(self._forms) :]]
        for layout in layouts:
            self._reset(layout)
        self._adopt()

    def note(self) -> None:
        """An update was begun that changes weights: they have new versions, which are not an edit."""
        self._stamps = [self._stamp(i) for i in range(len(self._params))]

    def settled(self) -> None:
        """An update is done: what the weights are now is ours."""
        self._samples.take()

    def edited(self, by_data: bool = True) -> set[int]:
        """Parameters that somebody else has changed since the last update; `by_data`: through `.data`, too, which on a
        GPU waits for what the framework has enqueued."""
        stamped = {i for i, known in enumerate(self._stamps) if known != self._stamp(i)}
        return stamped | self._samples.changed() if by_data else stamped

    def kept(self) -> set[int]:
        """Parameters that hold what they held after the last update, wherever they are now. As bits: what was converted
        holds something else."""
        same = self._samples.kept_by(dict(enumerate(self._params)))
        return {
            i for i in same
            if _form(self._params[i]) == self._forms[i] and self._params[i]._version == self._stamps[i][1]
        }  # fmt: skip

    def take_edited(self, by_data: bool = True, reading: bool = False) -> None:
        """Mirrors of edited weights are copied anew, and their remainders start at 0. A weight that holds the same bits
        in other memory was moved, not edited: only its mirror is copied anew.

        reading: the state is read, and no update follows: that of weights which were given another dtype is left as it
        is. ParameterError when a weight was given another dtype, shape or memory format: its state is in another order.
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
        moved = self.kept()
        for layout in self._memory.layouts:
            if any(segment.param in edited for segment in layout.segments):
                self._memory.mirror_valid[layout.id] = False
                self._reset(layout, edited, moved)
        self._adopt()

    def _is_converted(self, param: int) -> bool:
        """Whether it has another dtype, and is as it was otherwise."""
        was, now = self._forms[param], _form(self._params[param])
        return was[0] != now[0] and was[1:] == now[1:]

    def loaded(self) -> None:
        """The weights are what they are now, whatever was known of them."""
        for layout in self._memory.layouts:
            self._memory.mirror_valid[layout.id] = False
            self._reset(layout)
        self._adopt()

    def _adopt(self) -> None:
        for param, place in zip(self._params, self._places, strict=True):
            if param.numel() and param.device == place:  # elsewhere it is no memory of this device
                self._device.adopt(param)
        self.note()
        self._samples.watch(dict(enumerate(self._params)))

    def _reset(self, layout: Layout, only: set[int] | None = None, moved: Collection[int] = ()) -> None:
        """What makes 16-bit weights fp32 ones begins anew. Samples say that a weight was only moved; where its master
        says otherwise, an element was edited, too."""
        if not layout.format.aux_bytes:
            return
        for segment in layout.segments:
            if only is None or segment.param in only:
                weights = flat(self._params[segment.param])[segment.offset : segment.offset + segment.numel]
                self._memory.reset_aux(layout.id, segment.start, weights, where_changed=segment.param in moved)

    def _stamp(self, param: int) -> tuple[int, int]:
        weight = self._params[param]
        return weight.data_ptr(), weight._version


def _form(param: torch.Tensor) -> Form:
    return str(param.dtype).removeprefix("torch."), tuple(param.shape), param.stride()
