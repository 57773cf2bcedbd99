"""Samples of tensors: they show what was changed through `.data`, which bumps no version.

Up to 64 elements of each tensor, evenly spread, compared as bits. Whoever scales, clamps, loads or initialises a tensor
changes some of them; a few single elements may be changed unseen.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

NUM_SAMPLES = 32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_view(tensor: torch.Tensor) -> torch.Tensor:
    """The sampled elements, as bits, still in the tensor's memory."""
    numel = tensor.numel()
    step = max(1, numel // NUM_SAMPLES)
    bits = tensor.detach().view(BITS[tensor.element_size()])
    return bits.as_strided((-(-numel // step),), (step,), tensor.storage_offset())


class Fingerprints:
    """What some tensors held when they were last taken, by key. Compared in one go: on a GPU that is one wait."""

    def __init__(self) -> None:
        self._views: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor] = {}

    def watch(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """These tensors from now on, as they are now."""
        self._views = {key: sample_view(tensor) for key, tensor in tensors.items() if tensor.numel()}
        self.take()

    def take(self) -> None:
        """What they hold now is what they are expected to hold."""
        self._taken = self._read()

    def changed(self) -> set[int]:
        """Keys of those that hold something else now."""
        now = self._read()
        if all(torch.equal(now[key], self._taken[key]) for key in now):
            return set()
        then = self._by_key(self._taken)
        return {key for key, part in self._by_key(now).items() if not torch.equal(part, then[key])}

    def kept_by(self, tensors: Mapping[int, torch.Tensor]) -> set[int]:
        """Keys of those `tensors` that hold, on whatever device, what the watched ones are expected to hold."""
        there = Fingerprints()
        there.watch(tensors)
        now, then = there._by_key(there._taken), self._by_key(self._taken)
        same_size = (key for key, part in now.items() if key in then and part.dtype == then[key].dtype)
        return {key for key in same_size if torch.equal(now[key].cpu(), then[key].cpu())}

    def _read(self) -> dict[int, torch.Tensor]:
        """All samples of one element size in one tensor, in the order of the keys."""
        return {size: torch.cat([view for _, view in group]) for size, group in self._groups().items()}

    def _groups(self) -> dict[int, list[tuple[int, torch.Tensor]]]:
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for key, view in self._views.items():
            groups.setdefault(view.element_size(), []).append((key, view))
        return groups

    def _by_key(self, read: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """What was read, tensor by tensor."""
        found: dict[int, torch.Tensor] = {}
        for size, group in self._groups().items():
            parts = read[size].split([len(view) for _, view in group])
            found |= {key: part for (key, _), part in zip(group, parts, strict=True)}
        return found
