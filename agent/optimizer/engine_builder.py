"""Builds the engine from the settings in `Offload`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.engine_settings import EngineSettings
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.parameters.shards import gradients_are_final
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.ranks import Ranks, cpu_lane_threads
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.plan.effective_knobs import Effective


def build_engine(
    params: Sequence[torch.nn.Parameter],
    layouts: Sequence[Layout],
    device: Device,
    offload: Offload,
    effective: Effective,
) -> Engine:
    """Opens the storage paths and builds the engine. Closes the paths and the device if this fails."""
    store: TierStore | None = None
    try:
        ranks, paths = Ranks.current(), offload.path_settings()
        store = TierStore(paths, ranks.rank) if paths else None
        settings = EngineSettings(
            num_slots=offload.num_slots,
            host_slots=offload.host_slots,
            cpu_threads=offload.cpu_threads or cpu_lane_threads(),
            policy=offload.policy,
            gradients=offload.gradients,
            accumulation=offload.accumulation,
            gradient_memory_bytes=offload.gradient_memory_bytes,
            headroom_bytes=offload.headroom_bytes,
            early_gradients=ranks.count == 1 or all(map(gradients_are_final, params)),
            watchdog_seconds=offload.watchdog_seconds,
        )
        return Engine(params, layouts, device, settings, effective=effective, store=store)
    except BaseException:
        with suppress(Exception):  # the original error is raised
            close_all(*([store.close] if store is not None else []), device.close)
        raise
