"""What a rule's data says, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import tidegate
from tests.rules.toys import make_known
from tidegate import kernels
from tidegate.errors import ConfigError, ParameterError
from tidegate.rules.rule import MAX_TENSORS_TEXT, StateTensor, find, names

make_known()


def test_rules_are_found_by_name() -> None:
    assert {"adamw", "deepspeed_adamw", "sgd_plain", "momentum"} <= set(names())
    assert "rule" not in names()
    for name in names():
        assert find(name).name == name == kernels.implementation(name).rule.name


def test_a_rule_that_is_none_is_refused_with_those_that_there_are() -> None:
    for call in (find, kernels.implementation):
        with pytest.raises(ConfigError, match=r"no update rule 'lion': use one of adamw, deepspeed_adamw"):
            call("lion")


def test_the_state_of_adamw_is_two_fp32_tensors() -> None:
    for rule in (find("adamw"), find("deepspeed_adamw")):
        assert rule.bytes_per_param == 8
        assert rule.tensors_text == "exp_avg:float32 exp_avg_sq:float32"
        assert rule.stored_as == "adamw"


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""}, {"name": "x" * 17}, {"name": "ädam"},
        {"tensors": tuple(StateTensor(f"tensor_{i}") for i in range(MAX_TENSORS_TEXT // 16))},
    ],
)  # fmt: skip
def test_what_a_state_file_cannot_name_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        replace(find("adamw"), **change)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([StateTensor("master")], "'master' of a state tensor"),
        ([StateTensor("velocity"), StateTensor("velocity", "bfloat16")], "'velocity' of a state tensor"),
        ([StateTensor("my tensor")], "'my tensor' of a state tensor"),
        ([StateTensor("x" * 65)], "1 to 64 lower-case letters"),
        ([StateTensor("velocity", cast("Any", "float64"))], "dtype 'float64' of state tensor 'velocity'"),
    ],
)
def test_state_tensors_have_names_and_dtypes_that_files_can_hold(tensors: list[StateTensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(find("adamw"), tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lr": -1.0}, "lr=-1.0 is out of range: it must be at least 0."),
        ({"momentum": 1.0}, "momentum=1.0 is out of range: it must be at least 0 and below 1."),
        ({"betas": (0.9, 0.99)}, "'betas' is not an option of momentum"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements: it must have 1"),
    ],
)
def test_hyperparameters_are_those_of_the_rule(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        tidegate.Optimizer([torch.nn.Parameter(torch.zeros(2, 3))], "momentum", **given)


def test_a_shape_that_the_rule_does_not_take_is_refused() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ParameterError, match=r"Parameter 1 has 1 dimensions.*'momentum' takes 2 to 2"):
        tidegate.Optimizer(params, "momentum")
