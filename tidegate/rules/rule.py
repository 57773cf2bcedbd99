"""What an update rule is: its state tensors, its hyperparameters and its cost, as data. `find` finds a rule by name.

A rule is a module of `tidegate.rules` with the attribute `RULE`. The planner, the memory, the formats on disk and the
capacity planner read this data. A module of the same name in `tidegate.kernels` computes the updates.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from tidegate import rules
from tidegate.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16", "int16", "uint16", "int8", "uint8"]
DTYPE_BYTES: Final[Mapping[Dtype, int]] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of an element, by dtype. The names are torch's."""
MAX_NAME: Final = 16
"""Maximum length of a rule's name, in characters: a state file has this room for it."""
MAX_TENSORS_TEXT: Final = 256
"""Maximum length of `UpdateRule.tensors_text`, in characters: a state file has this room for it."""

_TENSOR_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_RESERVED: Final = ("step", "remainder", "master")
"""Names that a rule's state tensor may not have, because other state of a parameter has them."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One array of state, with an element for each parameter."""

    name: str
    dtype: Dtype = "float32"
    """A key of `DTYPE_BYTES`."""

    @property
    def nbytes(self) -> int:
        """Bytes per parameter."""
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A hyperparameter of a param group: a number, a flag, or a tuple of numbers. Each number is at least `least` and,
    unless `below` is None, below `below`."""

    name: str
    default: float | tuple[float, ...]
    least: float = 0.0
    below: float | None = None

    def check(self, value: Any) -> None:
        """Raises ConfigError if a number is out of range, or if there are too many or too few numbers."""
        is_one = not isinstance(self.default, tuple)
        numbers = (value,) if is_one or not isinstance(value, Iterable) else tuple(value)
        if isinstance(self.default, tuple) and len(numbers) != len(self.default):
            raise ConfigError(f"{self.name}={value!r} has {len(numbers)} numbers: it must have {len(self.default)}.")
        for index, number in enumerate(numbers):
            if not (number >= self.least and (self.below is None or number < self.below)):
                name = self.name if is_one else f"{self.name}[{index}]"
                most = "" if self.below is None else f" and below {self.below:g}"
                raise ConfigError(f"{name}={number} is out of range: it must be at least {self.least:g}{most}.")


@dataclass(frozen=True)
class UpdateRule:
    """An update rule that treats each element of a parameter alone.

    tensors: the state; the weight, and what completes a 16-bit weight to fp32, are not part of it.
    flops_per_param: floating-point operations of an update, per parameter.
    least_dims, most_dims: fewest and most dimensions of a parameter that the rule can update.
    same_state_as: name of another rule whose state has the same meaning, so that each can load the other's state.
    """

    name: str
    tensors: tuple[StateTensor, ...]
    hyperparameters: tuple[Hyperparameter, ...]
    flops_per_param: int
    least_dims: int = 0
    most_dims: float = math.inf
    same_state_as: str = ""

    def __post_init__(self) -> None:
        for text, most in ((self.name, MAX_NAME), (self.tensors_text, MAX_TENSORS_TEXT)):
            if not (text.isascii() and text.isprintable() and len(text) <= most) or not self.name:
                raise ValueError(f"{text!r} of rule {self.name!r} must be at most {most} printable ASCII characters")
        names = [tensor.name for tensor in self.tensors]
        for tensor in self.tensors:
            if not _TENSOR_NAME.fullmatch(tensor.name) or tensor.name in _RESERVED or names.count(tensor.name) > 1:
                raise ValueError(
                    f"The name {tensor.name!r} of a state tensor of rule {self.name!r} must be 1 to 64 lower-case "
                    f"letters, digits and '_', other than the names of the rule's other tensors and {_RESERVED}"
                )
            if tensor.dtype not in DTYPE_BYTES:
                raise ValueError(
                    f"The dtype {tensor.dtype!r} of state tensor {tensor.name!r} must be one of "
                    f"{', '.join(DTYPE_BYTES)}"
                )

    @cached_property
    def bytes_per_param(self) -> int:
        """Bytes of all tensors, per parameter."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def stored_as(self) -> str:
        """The rule's name in files."""
        return self.same_state_as or self.name

    @property
    def tensors_text(self) -> str:
        """`tensors_text` of the tensors."""
        return tensors_text(self.tensors)

    @property
    def defaults(self) -> dict[str, Any]:
        """The default values of a param group's hyperparameters."""
        return {one.name: one.default for one in self.hyperparameters}


def tensors_text(tensors: Iterable[StateTensor]) -> str:
    """Names and dtypes of tensors as one text, such as "momentum:float32"."""
    return " ".join(f"{tensor.name}:{tensor.dtype}" for tensor in tensors)


def names() -> tuple[str, ...]:
    """The names of all rules, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(rules.__path__) if module.name != "rule"))


def find(name: str) -> UpdateRule:
    """The rule of this name. Raises ConfigError, with the known names, if there is none."""
    if name not in names():
        raise ConfigError(f"There is no update rule {name!r}: use one of {', '.join(names())}.")
    rule: UpdateRule = importlib.import_module(f"{rules.__name__}.{name}").RULE
    return rule
