"""Tidegate: offloads optimizer state from the GPU to host memory and storage, shows the transfers while training runs,
and lets the user tune them at run time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.agent.checkpoints.background import PendingCheckpoint as PendingCheckpoint
    from tidegate.agent.checkpoints.checkpoint import Checkpoint as Checkpoint
    from tidegate.agent.checkpoints.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from tidegate.agent.checkpoints.discovery import find_checkpoints as find_checkpoints
    from tidegate.agent.checkpoints.discovery import find_damaged_checkpoints as find_damaged_checkpoints
    from tidegate.agent.checkpoints.inspection import find_sound_checkpoint as find_sound_checkpoint
    from tidegate.agent.control.attach import Attachment as Attachment
    from tidegate.agent.control.attach import attach as attach
    from tidegate.agent.devices.emulated import EmulatedRates as EmulatedRates
    from tidegate.agent.integrations.ddp import overlap_ddp as overlap_ddp
    from tidegate.agent.integrations.deepspeed.enable import enable_deepspeed as enable_deepspeed
    from tidegate.agent.optimizer.adamw import AdamW as AdamW
    from tidegate.agent.optimizer.forward_overlap import ForwardOverlap as ForwardOverlap
    from tidegate.agent.optimizer.forward_overlap import overlap_forward as overlap_forward
    from tidegate.agent.optimizer.forward_overlap import wait as wait
    from tidegate.agent.optimizer.offload import Offload as Offload
    from tidegate.agent.tiers.file_path import PathSettings as PathSettings
    from tidegate.agent.tiers.object_settings import ObjectSettings as ObjectSettings

__version__ = "0.1.0"

_HOME = {
    "AdamW": "tidegate.agent.optimizer.adamw",
    "Offload": "tidegate.agent.optimizer.offload",
    "EmulatedRates": "tidegate.agent.devices.emulated",
    "Attachment": "tidegate.agent.control.attach",
    "attach": "tidegate.agent.control.attach",
    "overlap_ddp": "tidegate.agent.integrations.ddp",
    "enable_deepspeed": "tidegate.agent.integrations.deepspeed.enable",
    "ForwardOverlap": "tidegate.agent.optimizer.forward_overlap",
    "overlap_forward": "tidegate.agent.optimizer.forward_overlap",
    "wait": "tidegate.agent.optimizer.forward_overlap",
    "ObjectSettings": "tidegate.agent.tiers.object_settings",
    "PathSettings": "tidegate.agent.tiers.file_path",
    "PendingCheckpoint": "tidegate.agent.checkpoints.background",
    "Checkpoint": "tidegate.agent.checkpoints.checkpoint",
    "DamagedCheckpoint": "tidegate.agent.checkpoints.checkpoint",
    "find_checkpoints": "tidegate.agent.checkpoints.discovery",
    "find_damaged_checkpoints": "tidegate.agent.checkpoints.discovery",
    "find_sound_checkpoint": "tidegate.agent.checkpoints.inspection",
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
    """Imports the subpackage of a public name on its first use, so that `import tidegate` does not import torch."""
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
