"""Tidegate: optimizer state outside the device, visible while it moves, tunable while training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.agent.attach import Attachment as Attachment
    from tidegate.agent.attach import attach as attach
    from tidegate.agent.devices.emulated import EmulatedRates as EmulatedRates
    from tidegate.agent.integrations.ddp import overlap_ddp as overlap_ddp
    from tidegate.agent.integrations.deepspeed import enable_deepspeed as enable_deepspeed
    from tidegate.agent.offload import Offload as Offload
    from tidegate.agent.optimizer import AdamW as AdamW
    from tidegate.agent.overlap import ForwardOverlap as ForwardOverlap
    from tidegate.agent.overlap import overlap_forward as overlap_forward
    from tidegate.agent.overlap import wait as wait
    from tidegate.agent.tiers.drain import PendingCheckpoint as PendingCheckpoint
    from tidegate.agent.tiers.inspection import find_sound_checkpoint as find_sound_checkpoint
    from tidegate.agent.tiers.manifest import Checkpoint as Checkpoint
    from tidegate.agent.tiers.manifest import DamagedCheckpoint as DamagedCheckpoint
    from tidegate.agent.tiers.manifest import find_checkpoints as find_checkpoints
    from tidegate.agent.tiers.manifest import find_damaged_checkpoints as find_damaged_checkpoints
    from tidegate.agent.tiers.object_settings import ObjectSettings as ObjectSettings
    from tidegate.agent.tiers.path import PathSettings as PathSettings

__version__ = "0.1.0"

_HOME = {
    "AdamW": "tidegate.agent.optimizer",
    "Offload": "tidegate.agent.offload",
    "EmulatedRates": "tidegate.agent.devices.emulated",
    "Attachment": "tidegate.agent.attach",
    "attach": "tidegate.agent.attach",
    "overlap_ddp": "tidegate.agent.integrations.ddp",
    "enable_deepspeed": "tidegate.agent.integrations.deepspeed",
    "ForwardOverlap": "tidegate.agent.overlap",
    "overlap_forward": "tidegate.agent.overlap",
    "wait": "tidegate.agent.overlap",
    "ObjectSettings": "tidegate.agent.tiers.object_settings",
    "PathSettings": "tidegate.agent.tiers.path",
    "PendingCheckpoint": "tidegate.agent.tiers.drain",
    "Checkpoint": "tidegate.agent.tiers.manifest",
    "DamagedCheckpoint": "tidegate.agent.tiers.manifest",
    "find_checkpoints": "tidegate.agent.tiers.manifest",
    "find_damaged_checkpoints": "tidegate.agent.tiers.manifest",
    "find_sound_checkpoint": "tidegate.agent.tiers.inspection",
}

__all__ = [
    "AdamW",
    "Attachment",
    "Checkpoint",
    "DamagedCheckpoint",
    "EmulatedRates",
    "ForwardOverlap",
    "ObjectSettings",
    "Offload",
    "PathSettings",
    "PendingCheckpoint",
    "attach",
    "enable_deepspeed",
    "find_checkpoints",
    "find_damaged_checkpoints",
    "find_sound_checkpoint",
    "overlap_ddp",
    "overlap_forward",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Loads a part when one of its names is first used, so that the core imports without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "psutil", "prometheus_client", "numpy"):
            raise ImportError(f"tidegate.{name} needs {error.name}: pip install 'tidegate[agent]'.") from error
        raise


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
