"""Copies: every byte arrives, and none beside them changes. Large copies go past the cache, small ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate import kernels

LINE = 64
GUARD = 4 * LINE
SIZES = [0, 1, 63, 64, 65, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (1 << 20) + 37, (4 << 20) + 129]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("to", [0, 1, 16, 63])
@pytest.mark.parametrize("begin", [0, 1, 48])
def test_every_byte_and_no_other(nbytes: int, to: int, begin: int) -> None:
    """Whatever line of the cache source and destination begin in."""
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2 * GUARD, dtype=np.uint8)
    target = kernels.aligned_buffer(nbytes + 2 * GUARD)
    target[:] = 0xA5
    expected = target.copy()
    expected[GUARD + to : GUARD + to + nbytes] = source[begin : begin + nbytes]
    kernels.copy(target.ctypes.data + GUARD + to, source.ctypes.data + begin, nbytes)
    np.testing.assert_array_equal(target, expected)
