"""Settings: each says its unit and its default, and each refuses what it cannot work with, by name, value and bound."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tidegate
from tidegate.errors import ConfigError, KnobError

GIVEN: dict[type, dict[str, Any]] = {
    tidegate.Offload: {"paths": {"nvme": "/nvme"}},
    tidegate.PathSettings: {"directory": "/nvme"},
    tidegate.ObjectSettings: {"url": "s3://bucket/prefix"},
    tidegate.EmulatedRates: {},
}
"""The classes of settings, each with arguments that it works with."""
FIELDS = [(kind, field) for kind in GIVEN for field in dataclasses.fields(kind)]
NAMES = [f"{kind.__name__}.{field.name}" for kind, field in FIELDS]
ENTRY = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |^$|\Z)", re.MULTILINE | re.DOTALL)
UNIT = re.compile(r"\((?P<unit>[^();]+); (?:default (?P<default>[^;]+)|required)\)\.$")


def entries(documentation: str) -> dict[str, str]:
    """What a docstring says of each setting, as one line."""
    return {name: " ".join(text.split()) for name, text in ENTRY.findall(f"{documentation}\n")}


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=NAMES)
def test_each_field_says_its_unit_and_its_default(kind: type, field: dataclasses.Field[Any]) -> None:
    said = UNIT.search(entries(kind.__doc__ or "")[field.name])
    assert said is not None, "the entry does not end in (unit; default …)."
    default = default_of(field)
    if said["default"] is None:
        assert default is dataclasses.MISSING
    elif dataclasses.is_dataclass(default):
        assert said["default"] == f"{type(default).__name__}()"
    else:
        assert ast.literal_eval(said["default"]) == default


@pytest.mark.parametrize("name", ["decoupled", "max_grad_norm", "offload"])
def test_arguments_of_the_optimizer_that_torch_does_not_have_say_it_too(name: str) -> None:
    assert UNIT.search(entries(tidegate.AdamW.__doc__ or "")[name])


class Nothing:
    """A value of no type that a setting has."""

    def __repr__(self) -> str:
        return "<nothing>"


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=NAMES)
def test_each_field_refuses_a_value_of_another_type(kind: type, field: dataclasses.Field[Any]) -> None:
    with pytest.raises(ConfigError, match=f"{field.name}=<nothing>"):
        kind(**{**GIVEN[kind], field.name: Nothing()})


def is_whole(field: dataclasses.Field[Any]) -> bool:
    return field.type == "int"


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field) for kind, field in FIELDS if is_whole(field)],
    ids=[f"{kind.__name__}.{field.name}" for kind, field in FIELDS if is_whole(field)],
)
def test_whole_numbers(kind: type, field: dataclasses.Field[Any]) -> None:
    for wrong in ("3", 1.5, True, math.nan, None):
        with pytest.raises(ConfigError, match=rf"{field.name}={wrong!r}.* is not a whole number: give one of at least"):
            kind(**{**GIVEN[kind], field.name: wrong})
    with pytest.raises(ConfigError, match=rf"{field.name}=-1.* is out of range: at least \d+"):
        kind(**{**GIVEN[kind], field.name: -1})
    taken = getattr(kind(**{**GIVEN[kind], field.name: 4096e3}), field.name)
    assert (taken, type(taken)) == (4_096_000, int)


def adamw(**settings: Any) -> Callable[[], object]:
    return lambda: tidegate.AdamW([torch.nn.Parameter(torch.zeros(3))], **settings)


def offload(**settings: Any) -> Callable[[], object]:
    return lambda: tidegate.Offload(**settings)


def rates(**settings: Any) -> Callable[[], object]:
    return lambda: tidegate.EmulatedRates(**settings)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (offload(device="tpu"), r"device='tpu' is unknown: use 'auto' or 'emulated'"),
        (offload(gradients="free"), r"gradients='free' is unknown: use 'keep' or 'release'"),
        (offload(accumulation="disk"), r"accumulation='disk' is unknown: use 'device', 'host' or 'host_fp32'"),
        (offload(policy="fast"), r"policy='fast' is unknown: use 'interleaved', 'sequential' or 'twinflow'"),
        (offload(watchdog_seconds=0), r"watchdog_seconds=0 is out of range: more than 0"),
        (offload(watchdog_seconds="1"), r"watchdog_seconds='1' is not a number: give one of more than 0"),
        (offload(paths={3: "/nvme"}), r"a name in paths=3 is not a string"),
        (offload(emulated={"h2d_bytes_per_second": 1}), r"emulated=\{.*\} is a dict: give tidegate\.EmulatedRates"),
        (rates(h2d_bytes_per_second=0), r"h2d_bytes_per_second=0 is out of range: more than 0"),
        (rates(d2h_bytes_per_second=math.nan), r"d2h_bytes_per_second=nan is not a number"),
        (lambda: tidegate.PathSettings(directory=b"/nvme"), r"directory=b'/nvme' of a path is a bytes"),
        (lambda: tidegate.PathSettings(directory="s3://b/x"), r"directory='s3://b/x' is an address, not a directory"),
        (lambda: tidegate.PathSettings(directory="/x", block_bytes=5000), r"block_bytes=5000 .* multiple of 4096"),
        (adamw(decoupled="no"), r"decoupled='no' is not a flag: give True or False"),
        (adamw(max_grad_norm="1"), r"max_grad_norm='1' .* is not a number: give one of more than 0"),
        (adamw(max_grad_norm=math.nan), r"max_grad_norm=nan .* is not a number"),
        (adamw(offload=Nothing()), r"offload=<nothing> is a Nothing, not a tidegate\.Offload"),
    ],
)  # fmt: skip
def test_errors_name_value_and_bound(build: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build()


def test_knobs_have_errors_of_their_own() -> None:
    for name, wrong in (("stride", 0.5), ("static_ratio", 2), ("order", "fast")):
        with pytest.raises(KnobError, match=f"{name}={wrong!r} is out of range: ") as refused:
            tidegate.Offload(paths={"nvme": "/nvme"}, **{name: wrong})
        assert refused.value.knob == name


def test_speeds_of_the_emulated_device_may_change_and_are_checked_then_too() -> None:
    changing = tidegate.EmulatedRates(h2d_bytes_per_second=1e6, update_params_per_second=math.inf)
    changing.h2d_bytes_per_second = 2e6
    with pytest.raises(ConfigError, match="h2d_bytes_per_second=-1"):
        changing.h2d_bytes_per_second = -1
    assert vars(changing) == {
        "h2d_bytes_per_second": 2e6, "d2h_bytes_per_second": 4e9, "update_params_per_second": math.inf,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"token": 3}, "token is a int, not a string"),
        ({"metrics_bind": 3}, "metrics_bind=3 is not a string"),
        ({"reset_knobs": "yes"}, "reset_knobs='yes' is not a flag"),
        ({"strict": 1}, "strict=1 is not a flag"),
        ({"advertise_host": 3}, "advertise_host=3 is not a host"),
        ({"metrics_port": "9000"}, "metrics_port='9000' is not a port"),
        ({"model": 3}, "model is a int, not a torch.nn.Module"),
        ({"daemon": 3}, "daemon=3 is not a string"),
        ({"daemon": "3"}, "daemon=.3.: .* is not an address"),
    ],
)
def test_arguments_of_attach(given: dict[str, Any], says: str) -> None:
    with tidegate.AdamW([torch.nn.Parameter(torch.zeros(3))]) as optimizer:
        with pytest.raises(ConfigError, match=says):
            tidegate.attach(optimizer, run="any", **given)
        assert optimizer.attachment is None
