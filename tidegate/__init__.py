"""Tidegate: optimizer state outside the device, visible while it moves, tunable while training runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.agent.attach import Attachment as Attachment
    from tidegate.agent.attach import attach as attach
    from tidegate.agent.devices.emulated import EmulatedRates as EmulatedRates
    from tidegate.agent.optimizer import AdamW as AdamW
    from tidegate.agent.optimizer import Offload as Offload

__version__ = "0.1.0"

_HOME = {
    "AdamW": "tidegate.agent.optimizer",
    "Offload": "tidegate.agent.optimizer",
    "EmulatedRates": "tidegate.agent.devices.emulated",
    "Attachment": "tidegate.agent.attach",
    "attach": "tidegate.agent.attach",
}

__all__ = ["AdamW", "Attachment", "EmulatedRates", "Offload", "attach"]


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
