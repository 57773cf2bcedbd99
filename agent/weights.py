"""The weights as the user sees them. They are authoritative: what was edited counts, whoever did it and however."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidegate.agent.devices.base import Device
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.fingerprint import Fingerprints
from tidegate.agent.subgroups import Layout, flat
from tidegate.errors import ParameterError

Form = tuple[str, tuple[int, ...], tuple[int, ...]]


class Weights:
    """Sees edits by address and version, and by samples where `.data` was used. `params` grows with the engine's."""

    def __init__(self, device: Device, memory: StateMemory, params: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._memory = memory
        self._params = params
        self._forms: list[Form] = []
        self._stamps: list[tuple[int, int]] = []
        self._samples = Fingerprints()
        self.extend(memory.layouts)

    def extend(self, layouts: Sequence[Layout]) -> None:
        """Parameters came with these subgroups."""
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

    def take_edited(self, by_data: bool = True) -> None:
        """Mirrors of edited weights are copied anew, and their remainders start at 0.

        ParameterError when a weight was given another dtype, shape or memory format: its state is in another order.
        """
        edited = self.edited(by_data)
        if not edited:
            return
        for index in edited:
            if _form(self._params[index]) != self._forms[index]:
                raise ParameterError(
                    f"Parameter {index} had dtype, shape and strides {self._forms[index]} when the optimizer was built "
                    f"and has {_form(self._params[index])} now. Convert the model before building the optimizer."
                )
        for layout in self._memory.layouts:
            if any(segment.param in edited for segment in layout.segments):
                self._memory.mirror_valid[layout.id] = False
                self._reset(layout, edited)
        self._adopt()

    def loaded(self) -> None:
        """The weights are what they are now, whatever was known of them."""
        for layout in self._memory.layouts:
            self._memory.mirror_valid[layout.id] = False
            self._reset(layout)
        self._adopt()

    def _adopt(self) -> None:
        for param in self._params:
            if param.numel():
                self._device.adopt(param)
        self.note()
        self._samples.watch(dict(enumerate(self._params)))

    def _reset(self, layout: Layout, only: set[int] | None = None) -> None:
        if not layout.format.aux_bytes:
            return
        for segment in layout.segments:
            if only is None or segment.param in only:
                weights = flat(self._params[segment.param])[segment.offset : segment.offset + segment.numel]
                self._memory.reset_aux(layout.id, segment.start, weights)

    def _stamp(self, param: int) -> tuple[int, int]:
        weight = self._params[param]
        return weight.data_ptr(), weight._version


def _form(param: torch.Tensor) -> Form:
    return str(param.dtype).removeprefix("torch."), tuple(param.shape), param.stride()
