"""The configurations that are predicted and measured. They are drawn at random with a seed, so that easy ones are not
preferred."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tidegate.knobs.knobs import Knobs, specs_for
from tidegate.plan.residency import GradientMode

STRIDES: Final = ("off", "off", "off", 3.0, 5.0, 8.0, 12.0)
"""Strides to draw from. The emulated device is slower than the CPU, so that the fastest configurations have a large
stride or `off`."""
STATIC_RATIOS: Final = (0.0, 0.0, 0.125, 0.25, 0.5)
CACHES: Final = (0.0, 0.0, 0.25, 0.5, 0.75, 1.0)
"""Sizes of the host cache to draw from, as a share of the state."""
ORDERS: Final = ("pinned", "pinned", "alternate")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Properties of a training that knobs do not change: the names of its paths, the parameters of a subgroup, and the
    mode of gradients. There is one training for each kind."""

    paths: tuple[str, ...]
    subgroup_numel: int
    gradients: GradientMode = "keep"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One configuration: a kind of training, and knobs. cache_share: host cache, as a share of the state."""

    kind: Kind
    knobs: Knobs
    cache_share: float

    def to_dict(self) -> dict[str, object]:
        found: dict[str, object] = {
            "paths": list(self.kind.paths), "subgroup_numel": self.kind.subgroup_numel, "stride": self.knobs.stride,
            "static_ratio": self.knobs.static_ratio, "gradients": self.kind.gradients,
        }  # fmt: skip
        if self.kind.paths:
            found |= {"cache_share": self.cache_share, "order": self.knobs.order, "tier_split": self.knobs.tier_split}
        return found


def draw(kinds: Sequence[Kind], state_bytes: int, count: int, seed: int) -> list[Choice]:
    """Draws `count` different configurations at random, the same number for each kind (if `count` is a multiple).
    state_bytes: bytes of state of the training."""
    random_ = random.Random(seed)
    found: dict[tuple[Kind, str], Choice] = {}
    while len(found) < count:
        choice = _one(random_, kinds[len(found) % len(kinds)], state_bytes)
        found.setdefault((choice.kind, str(sorted(choice.knobs.as_dict(paths=True).items()))), choice)
    return list(found.values())


def _one(random_: random.Random, kind: Kind, state_bytes: int) -> Choice:
    wanted: dict[str, object] = {"stride": random_.choice(STRIDES), "static_ratio": random_.choice(STATIC_RATIOS)}
    share = random_.choice(CACHES) if kind.paths else 1.0
    if kind.paths:
        wanted |= {
            "host_cache": int(share * state_bytes),
            "order": random_.choice(ORDERS) if 0 < share < 1 else "pinned",
        }
        wanted["tier_split"] = _split(random_, kind.paths)
    return Choice(kind=kind, knobs=Knobs().changed(wanted, specs_for(kind.paths)), cache_share=share)


def _split(random_: random.Random, paths: Sequence[str]) -> str:
    return ",".join(f"{name}:{random_.randint(1, 3)}" for name in paths)


def by_kind(choices: Sequence[Choice]) -> Mapping[Kind, list[Choice]]:
    found: dict[Kind, list[Choice]] = {}
    for choice in choices:
        found.setdefault(choice.kind, []).append(choice)
    return found
