"""Updates in the background without a model, as `tidegate.overlap_forward` lets them run after an observed forward."""

from __future__ import annotations

import tidegate


class _Always:
    in_background = True

    def rebuild(self) -> None:
        pass

    def close(self) -> None:
        pass


def update_in_background(optimizer: tidegate.Optimizer) -> None:
    """From now on `step()` of this optimizer returns before its update has ended."""
    optimizer._begin_overlap(_Always())
