"""Tidegate: offloads optimizer state from the GPU to host memory and storage, shows the transfers while training runs,
and lets the user tune them at run time.

`AdamW` is the optimizer, and `Offload` has its settings; `Optimizer` takes other update rules. `attach`,
`overlap_forward`, `overlap_ddp` and `enable_deepspeed` each switch on one feature, and return a handle whose `close()`
switches it off. `find_checkpoints`, `find_sound_checkpoint` and `find_damaged_checkpoints` find checkpoints that
`AdamW.save_checkpoint` has written. All errors are subclasses of `TidegateError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tidegate.agent.checkpoints.background import PendingCheckpoint as PendingCheckpoint
    from tidegate.agent.checkpoints.checkpoint import Checkpoint as Checkpoint
    from tidegate.agent.checkpoints.checkpoint import DamagedCheckpoint as DamagedCheckpoint
    from tidegate.agent.checkpoints.discovery import find_checkpoints as find_checkpoints
    from tidegate.agent.checkpoints.discovery import find_damaged_checkpoints as find_damaged_checkpoints
    from tidegate.agent.checkpoints.inspection import find_sound_checkpoint as find_sound_checkpoint
    from tidegate.agent.control.attach import attach as attach
    from tidegate.agent.control.attachment import Attachment as Attachment
    from tidegate.agent.devices.emulated import EmulatedRates as EmulatedRates
    from tidegate.agent.integrations.ddp import DdpOverlap as DdpOverlap
    from tidegate.agent.integrations.ddp import overlap_ddp as overlap_ddp
    from tidegate.agent.integrations.deepspeed.enable import DeepSpeedIntegration as DeepSpeedIntegration
    from tidegate.agent.integrations.deepspeed.enable import enable_deepspeed as enable_deepspeed
    from tidegate.agent.optimizer.adamw import AdamW as AdamW
    from tidegate.agent.optimizer.forward_overlap import ForwardOverlap as ForwardOverlap
    from tidegate.agent.optimizer.forward_overlap import overlap_forward as overlap_forward
    from tidegate.agent.optimizer.forward_overlap import wait as wait
    from tidegate.agent.optimizer.offload import Offload as Offload
    from tidegate.agent.optimizer.optimizer import Optimizer as Optimizer
    from tidegate.agent.tiers.file_path import PathSettings as PathSettings
    from tidegate.agent.tiers.object_settings import ObjectSettings as ObjectSettings
    from tidegate.errors import BlockDamaged as BlockDamaged
    from tidegate.errors import CapacityError as CapacityError
    from tidegate.errors import CheckpointFailed as CheckpointFailed
    from tidegate.errors import CheckpointTaken as CheckpointTaken
    from tidegate.errors import ConfigError as ConfigError
    from tidegate.errors import DaemonError as DaemonError
    from tidegate.errors import DaemonUnproven as DaemonUnproven
    from tidegate.errors import DaemonUnreachable as DaemonUnreachable
    from tidegate.errors import DataError as DataError
    from tidegate.errors import DataTruncated as DataTruncated
    from tidegate.errors import DeviceAccessError as DeviceAccessError
    from tidegate.errors import EngineError as EngineError
    from tidegate.errors import FileDamaged as FileDamaged
    from tidegate.errors import FileUnreadable as FileUnreadable
    from tidegate.errors import ForeignByteOrder as ForeignByteOrder
    from tidegate.errors import ForeignRun as ForeignRun
    from tidegate.errors import ForeignState as ForeignState
    from tidegate.errors import HeaderContradiction as HeaderContradiction
    from tidegate.errors import HeaderDamaged as HeaderDamaged
    from tidegate.errors import HeaderTruncated as HeaderTruncated
    from tidegate.errors import KnobError as KnobError
    from tidegate.errors import LaneStuckError as LaneStuckError
    from tidegate.errors import LocksUnusable as LocksUnusable
    from tidegate.errors import ManifestDamaged as ManifestDamaged
    from tidegate.errors import MemoryBudgetError as MemoryBudgetError
    from tidegate.errors import NewerFormat as NewerFormat
    from tidegate.errors import NoCheckpoint as NoCheckpoint
    from tidegate.errors import NoPathLeft as NoPathLeft
    from tidegate.errors import NotAStateFile as NotAStateFile
    from tidegate.errors import NotAuthorized as NotAuthorized
    from tidegate.errors import NotFound as NotFound
    from tidegate.errors import ParameterError as ParameterError
    from tidegate.errors import PathFailed as PathFailed
    from tidegate.errors import PathFull as PathFull
    from tidegate.errors import PathUnusable as PathUnusable
    from tidegate.errors import PlanError as PlanError
    from tidegate.errors import RankTaken as RankTaken
    from tidegate.errors import ScratchTaken as ScratchTaken
    from tidegate.errors import StaleKnobs as StaleKnobs
    from tidegate.errors import StateFileError as StateFileError
    from tidegate.errors import StateLost as StateLost
    from tidegate.errors import StorageError as StorageError
    from tidegate.errors import StrangeEntry as StrangeEntry
    from tidegate.errors import TidegateError as TidegateError
    from tidegate.errors import UnknownChecksum as UnknownChecksum
    from tidegate.errors import WeightsMismatch as WeightsMismatch
    from tidegate.errors import WrongStep as WrongStep

__version__ = "0.1.0"

_MODULES: Final = {
    "AdamW": "tidegate.agent.optimizer.adamw",
    "Attachment": "tidegate.agent.control.attachment",
    "Checkpoint": "tidegate.agent.checkpoints.checkpoint",
    "DamagedCheckpoint": "tidegate.agent.checkpoints.checkpoint",
    "DdpOverlap": "tidegate.agent.integrations.ddp",
    "DeepSpeedIntegration": "tidegate.agent.integrations.deepspeed.enable",
    "EmulatedRates": "tidegate.agent.devices.emulated",
    "ForwardOverlap": "tidegate.agent.optimizer.forward_overlap",
    "ObjectSettings": "tidegate.agent.tiers.object_settings",
    "Offload": "tidegate.agent.optimizer.offload",
    "Optimizer": "tidegate.agent.optimizer.optimizer",
    "PathSettings": "tidegate.agent.tiers.file_path",
    "PendingCheckpoint": "tidegate.agent.checkpoints.background",
    "attach": "tidegate.agent.control.attach",
    "enable_deepspeed": "tidegate.agent.integrations.deepspeed.enable",
    "find_checkpoints": "tidegate.agent.checkpoints.discovery",
    "find_damaged_checkpoints": "tidegate.agent.checkpoints.discovery",
    "find_sound_checkpoint": "tidegate.agent.checkpoints.inspection",
    "overlap_ddp": "tidegate.agent.integrations.ddp",
    "overlap_forward": "tidegate.agent.optimizer.forward_overlap",
    "wait": "tidegate.agent.optimizer.forward_overlap",
}
"""The module of each public name except the errors. A module is imported when its name is first used."""

__all__ = [
    "AdamW",
    "Attachment",
    "Checkpoint",
    "DamagedCheckpoint",
    "DdpOverlap",
    "DeepSpeedIntegration",
    "EmulatedRates",
    "ForwardOverlap",
    "ObjectSettings",
    "Offload",
    "Optimizer",
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
    # errors, as the tree in `tidegate.errors`
    "TidegateError",
    "ConfigError",
    "KnobError",
    "MemoryBudgetError",
    "CapacityError",
    "ParameterError",
    "PlanError",
    "EngineError",
    "LaneStuckError",
    "DeviceAccessError",
    "StorageError",
    "PathFailed",
    "StateLost",
    "NoPathLeft",
    "PathUnusable",
    "PathFull",
    "LocksUnusable",
    "ScratchTaken",
    "NoCheckpoint",
    "CheckpointFailed",
    "CheckpointTaken",
    "StateFileError",
    "NotAStateFile",
    "NewerFormat",
    "ForeignByteOrder",
    "UnknownChecksum",
    "HeaderTruncated",
    "HeaderDamaged",
    "HeaderContradiction",
    "DataTruncated",
    "ManifestDamaged",
    "FileDamaged",
    "StrangeEntry",
    "FileUnreadable",
    "BlockDamaged",
    "ForeignRun",
    "ForeignState",
    "WrongStep",
    "WeightsMismatch",
    "DataError",
    "DaemonError",
    "DaemonUnreachable",
    "DaemonUnproven",
    "NotAuthorized",
    "NotFound",
    "StaleKnobs",
    "RankTaken",
]


def __getattr__(name: str) -> Any:
    """Imports the subpackage of a public name on its first use, so that `import tidegate` does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_MODULES.get(name, "tidegate.errors")), name)
    except ModuleNotFoundError as error:
        if error.name in ("torch", "psutil", "prometheus_client", "numpy"):
            raise ImportError(f"tidegate.{name} needs {error.name}: pip install 'tidegate[agent]'.") from error
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
