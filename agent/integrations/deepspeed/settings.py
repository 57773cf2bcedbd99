"""Parses the `"tidegate"` block of a DeepSpeed configuration, and translates DeepSpeed's own offload settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tidegate.agent.devices.emulated import EmulatedRates
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.tiers.file_path import PathSettings
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.errors import ConfigError

BLOCK = "tidegate"

OFFLOAD_KEYS = frozenset(one.name for one in fields(Offload)) - {"device"}
ATTACH_KEYS = frozenset({"run", "daemon", "metrics_bind", "metrics_port", "advertise_host", "reset_knobs", "strict"})
OWN_KEYS = frozenset({"enabled", "fallback"})


@dataclass(frozen=True)
class Settings:
    """Parsed `"tidegate"` block.

    enabled: whether Tidegate is used; False leaves the run to DeepSpeed.
    fallback: what happens where Tidegate cannot work. True: DeepSpeed's own optimizer is used, with a warning. False:
        an error is raised.
    offload: settings of the offload.
    attach: arguments of `tidegate.attach`, which is called if they include `run`.
    """

    enabled: bool = True
    fallback: bool = False
    offload: Offload = field(default_factory=Offload)
    attach: Mapping[str, Any] = field(default_factory=dict)


def block_of(config: object) -> Mapping[str, Any] | None:
    """Returns the `"tidegate"` block of DeepSpeed's configuration; None when there is none. ConfigError when it is not
    a JSON object."""
    block = config.get(BLOCK) if isinstance(config, Mapping) else None
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" in the DeepSpeed configuration is {block!r}: it must be a block, {{…}}.')
    return block


def settings_of(block: Mapping[str, Any], config: Mapping[str, Any]) -> Settings:
    """Settings from the block. `config`: the whole DeepSpeed configuration. ConfigError for unknown keys and invalid
    values."""
    known = OFFLOAD_KEYS | ATTACH_KEYS | OWN_KEYS
    for key in block:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join(sorted(known))}."
            raise ConfigError(f'"{BLOCK}" in the DeepSpeed configuration has an unknown key {key!r}.{hint}')
    attach = {key: block[key] for key in ATTACH_KEYS if key in block}
    if attach and "run" not in attach:
        raise ConfigError(
            f'"{BLOCK}" in the DeepSpeed configuration has {min(attach)!r} but no "run": name the run with "run".'
        )
    return Settings(
        enabled=_bool_of(block, "enabled", True),
        fallback=_bool_of(block, "fallback", False),
        offload=Offload(**_offload(block, config.get("zero_optimization") or {})),
        attach=attach,
    )


def _offload(block: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Offload`: the keys of the block; missing ones are derived from DeepSpeed's settings in `zero`."""
    offload = zero.get("offload_optimizer") or {}
    given = {key: block[key] for key in OFFLOAD_KEYS if key in block}
    if "emulated" in given:
        given["emulated"] = EmulatedRates(**_checked(given["emulated"], EmulatedRates, "emulated"))
    if "paths" in given:
        if not isinstance(given["paths"], Mapping):
            raise ConfigError(f'"{BLOCK}": paths is {given["paths"]!r}: it must be a block of names and directories.')
        given["paths"] = {name: _path(name, path) for name, path in given["paths"].items()}
    elif offload.get("device") == "nvme":
        given["paths"] = {"nvme": offload.get("nvme_path") or _no_nvme_path()}
    if "ratio" in offload and not given.keys() & {"stride", "static_ratio"}:
        # Twin-Flow: a share of the subgroups is kept and updated on the device, the CPU updates the others.
        given |= {"stride": "off", "static_ratio": 1.0 - float(offload["ratio"])}
    if isinstance(zero.get("sub_group_size"), int | float):
        given.setdefault("subgroup_numel", min(int(zero["sub_group_size"]), Offload.subgroup_numel))
    return given


def _path(name: str, given: object) -> str | PathSettings | ObjectSettings:
    """Converts the settings of one storage path: a directory or address as text, or a JSON object. ConfigError for
    other types."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        kind = ObjectSettings if "url" in given else PathSettings
        return kind(**_checked(given, kind, f"paths.{name}"))
    raise ConfigError(
        f'"{BLOCK}": paths.{name} is {given!r}: give a directory, an "s3://…" address, or a block of settings.'
    )


def _checked(given: object, kind: type, where: str) -> dict[str, Any]:
    """Returns the JSON object `given` as a dict. ConfigError if it is not an object, or has keys that are not fields of
    the class `kind`. `where`: name of the object in the configuration, for the text of the error."""
    known = {one.name for one in fields(kind)}
    if not isinstance(given, Mapping) or not known >= given.keys():
        raise ConfigError(
            f'"{BLOCK}": {where} is {given!r}: it must be a block with only these keys: {", ".join(sorted(known))}.'
        )
    return dict(given)


def _bool_of(block: Mapping[str, Any], name: str, default: bool) -> bool:
    value = block.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f'"{BLOCK}": {name} is {value!r}: it must be true or false.')
    return value


def _no_nvme_path() -> str:
    """Raises the ConfigError for a missing `nvme_path`. It never returns."""
    raise ConfigError(
        'offload_optimizer.device is "nvme", but nvme_path is missing: give nvme_path, or "paths" in "tidegate".'
    )
