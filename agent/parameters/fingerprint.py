"""Samples of tensors, to detect changes through `.data`, which do not increase the version of a tensor.

Up to 64 elements of each tensor, evenly spaced, are compared as bits. Scaling, clamping, loading or initialising a
tensor changes some of them; changes of a few single elements may go unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

NUM_SAMPLES = 32
"""A tensor with fewer elements than this is sampled completely. A larger tensor has at least NUM_SAMPLES samples, and
at most twice as many."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sample_view(tensor: torch.Tensor) -> torch.Tensor:
    """The sampled elements as integers of the same bits: a view of the tensor's memory."""
    numel = tensor.numel()
    step = max(1, numel // NUM_SAMPLES)
    bits = tensor.detach().view(BITS[tensor.element_size()])
    return bits.as_strided((-(-numel // step),), (step,), tensor.storage_offset())


class Fingerprints:
    """Reference samples of tensors, by key. All tensors are compared in one batch, which on a GPU is one
    synchronisation."""

    def __init__(self) -> None:
        self._views: dict[int, torch.Tensor] = {}
        self._reference: dict[int, torch.Tensor] = {}

    def set_tensors(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Replaces the tensors, and saves their present samples as the reference."""
        self._views = {key: sample_view(tensor) for key, tensor in tensors.items() if tensor.numel()}
        self.save_reference()

    def save_reference(self) -> None:
        """Saves the present samples as the reference."""
        self._reference = self._read_samples()

    def changed(self) -> set[int]:
        """Keys of the tensors whose samples differ from the reference."""
        now = self._read_samples()
        if all(torch.equal(now[key], self._reference[key]) for key in now):
            return set()
        then = self._by_key(self._reference)
        return {key for key, part in self._by_key(now).items() if not torch.equal(part, then[key])}

    def unchanged_in(self, tensors: Mapping[int, torch.Tensor]) -> set[int]:
        """Keys of those `tensors`, on any device, whose samples are equal to the reference."""
        other = Fingerprints()
        other.set_tensors(tensors)
        now, then = other._by_key(other._reference), self._by_key(self._reference)
        same_size = (key for key, part in now.items() if key in then and part.dtype == then[key].dtype)
        return {key for key in same_size if torch.equal(now[key].cpu(), then[key].cpu())}

    def _read_samples(self) -> dict[int, torch.Tensor]:
        """The present samples: one tensor for each element size in bytes, in the order of the keys."""
        return {size: torch.cat([view for _, view in group]) for size, group in self._groups().items()}

    def _groups(self) -> dict[int, list[tuple[int, torch.Tensor]]]:
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for key, view in self._views.items():
            groups.setdefault(view.element_size(), []).append((key, view))
        return groups

    def _by_key(self, read: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Divides the result of `_read_samples` into the samples of each tensor, by key."""
        by_key: dict[int, torch.Tensor] = {}
        for size, group in self._groups().items():
            parts = read[size].split([len(view) for _, view in group])
            by_key |= {key: part for (key, _), part in zip(group, parts, strict=True)}
        return by_key
