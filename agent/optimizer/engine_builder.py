"""Builds the engine, and the subgroups of its parameters, from the settings in `Offload`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from tidegate.agent.cleanup import close_all
from tidegate.agent.devices.base import Device
from tidegate.agent.engine.engine import Engine
from tidegate.agent.engine.engine_settings import EngineSettings
from tidegate.agent.engine.gradient_routing import GradientSource
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.parameters.shards import GradientNorm, gradients_are_final, shard_of
from tidegate.agent.parameters.subgroups import Layout, check_param, make_subgroups, shift_ids
from tidegate.agent.ranks import Ranks, cpu_lane_threads
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.rules.rule import UpdateRule


def build_engine(
    params: Sequence[torch.nn.Parameter],
    layouts: Sequence[Layout],
    device: Device,
    rule: Implementation,
    offload: Offload,
    effective: EffectiveKnobs,
    norm: GradientNorm,
    source: GradientSource,
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
        return Engine(
            params, layouts, device, rule, settings=settings, effective=effective, norm=norm, source=source, store=store
        )
    except BaseException:
        with suppress(Exception):  # the original error is raised
            close_all(*([store.close] if store is not None else []), device.close)
        raise


def layouts_of(param_groups: Sequence[Mapping[str, Any]], offload: Offload, rule: UpdateRule) -> tuple[Layout, ...]:
    """The subgroups of all parameters in the groups."""
    shards = [[shard_of(param) for param in group["params"]] for group in param_groups]
    return make_subgroups(shards, offload.subgroup_numel, rule)


def layouts_of_added(
    params: Sequence[torch.nn.Parameter],
    num_known: int,
    param_groups: Sequence[Mapping[str, Any]],
    engine: Engine,
    offload: Offload,
) -> list[Layout]:
    """The subgroups of parameters that are added as a new param group, the last of `param_groups`. Their ids and
    numbers continue those of the existing subgroups and parameters.

    num_known: number of parameters that the engine has already.
    """
    for index, param in enumerate(params, start=num_known):
        check_param(shard_of(param), index, engine.rule)
    layouts = make_subgroups([[shard_of(param) for param in params]], offload.subgroup_numel, engine.rule)
    return shift_ids(layouts, subgroups=len(engine.layouts), groups=len(param_groups) - 1, params=num_known)
