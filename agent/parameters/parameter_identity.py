"""Detects parameters that were moved, converted or replaced after the engine was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, Final

import torch

from tidegate.agent.parameters.shards import is_divided, shard_of
from tidegate.errors import ParameterError

REMEDY: Final = (
    "The state of an optimizer that has stepped does not follow its parameters. Move it back; or take "
    "optimizer.state_dict(), close() this optimizer, build one from the present parameters, and load the state there. "
    "Best is to move and convert the model before building the optimizer."
)


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """The properties of a parameter, or of this rank's shard of it, that an engine relies on."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, param: torch.Tensor) -> ParameterRecord:
        shard = shard_of(param)
        return cls(shard.device, shard.dtype, shard.shape, shard.stride())

    def difference(self, now: ParameterRecord) -> str:
        """Returns the first difference between this record and the record `now` of the same parameter, as the end of a
        sentence, such as "was on cpu when the optimizer was built and is on cuda:0 now"."""
        if self.device != now.device:
            return f"was on {self.device} when the optimizer was built and is on {now.device} now"
        if self.dtype != now.dtype:
            return f"had dtype {_short(self.dtype)} when the optimizer was built and has {_short(now.dtype)} now"
        return (
            f"had shape {tuple(self.shape)} and strides {self.strides} when the optimizer was built and has "
            f"{tuple(now.shape)} and {now.strides} now"
        )


class ParameterRecords:
    """The records of all parameters of an optimizer. Each step compares them with the present parameters. Without
    changes, this is one comparison of lists, and fast."""

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params: list[torch.nn.Parameter] = []
        self._records: list[ParameterRecord] = []
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._any_divided = False
        self.extend(params)

    def extend(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Records `params`, in addition to the parameters that are recorded already."""
        self._params += params
        self._any_divided = any(map(is_divided, self._params))
        self._records += [ParameterRecord.of(param) for param in params]
        self._addresses += [shard_of(param).data_ptr() for param in params]
        self._dtypes += [param.dtype for param in params]

    def was_moved(self, param: int) -> bool:
        """Whether this parameter has another device, dtype, shape or strides than when it was recorded."""
        shard = shard_of(self._params[param])
        same = shard.data_ptr() == self._addresses[param] and shard.dtype is self._dtypes[param]
        return not same and ParameterRecord.of(shard) != self._records[param]

    def first_moved(self, params: Sequence[torch.nn.Parameter]) -> int | None:
        """Number of the first parameter that was moved, converted or replaced; None when all `params` are unchanged."""
        if len(params) == len(self._params) and not any(map(is_not, params, self._params)):
            shards = [shard_of(param) for param in params] if self._any_divided else params
            addresses = [shard.data_ptr() for shard in shards]
            if addresses == self._addresses and [shard.dtype for shard in shards] == self._dtypes:
                return None
            return next((i for i in range(len(params)) if self.was_moved(i)), None)
        pairs = zip(params, self._params, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a is not b), min(len(params), len(self._params)))

    def are_exchanged(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Whether parameters were replaced by others to which the old state cannot be assigned. This is so if none of
        the old parameters is left, or if parameters that are not divided among ranks were replaced by divided ones.

        Parameters that only change their group, or are removed without a replacement, do not count as replaced. If old
        parameters remain, parameters that are added (such as a new head) count as new.
        """
        before, now = {id(param): param for param in self._params}, {id(param): param for param in params}
        left = [param for key, param in before.items() if key not in now]
        came = [param for key, param in now.items() if key not in before]
        if not left or not came:
            return False
        all_left = len(left) == len(before)
        return all_left or (any(map(is_divided, came)) and not all(map(is_divided, left)))

    def are_reordered(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the elements of the old state have another order than the elements of the present parameters, because
        parameters were replaced (see `are_exchanged`) or have other shapes or strides."""
        records = {id(param): record for param, record in zip(self._params, self._records, strict=True)}
        known = [(ParameterRecord.of(param), records[id(param)]) for param in params if id(param) in records]
        return self.are_exchanged(params) or any((a.shape, a.strides) != (b.shape, b.strides) for a, b in known)

    def can_be_regrouped(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the old state can be used for `params` after parameters were put into other groups, added or removed:
        parameters that stay have the same device, dtype, shape and strides, and no parameters were exchanged (see
        `are_exchanged`)."""
        records = {id(param): record for param, record in zip(self._params, self._records, strict=True)}
        return not self.are_exchanged(params) and all(
            ParameterRecord.of(param) == records[id(param)] for param in params if id(param) in records
        )

    def refusal(self, groups: Sequence[Mapping[str, Any]], index: int) -> ParameterError:
        """Returns the error for a changed parameter, with its name, the change and the remedy. index: number of the
        parameter."""
        params = [param for group in groups for param in group["params"]]
        name = name_of(groups, index)
        if index >= len(params) or index >= len(self._params) or params[index] is not self._params[index]:
            return ParameterError(f"Parameter {name} is not the parameter that the optimizer was built with. {REMEDY}")
        return ParameterError(
            f"Parameter {name} {self._records[index].difference(ParameterRecord.of(params[index]))}. {REMEDY}"
        )


def name_of(groups: Sequence[Mapping[str, Any]], index: int) -> str:
    """The name of the parameter with number `index` if the groups have names, else its position in its group."""
    for number, group in enumerate(groups):
        if index < len(group["params"]):
            names = group.get("param_names")
            return str(names[index]) if names else f"{index} of param group {number}"
        index -= len(group["params"])
    return f"{index} behind the last param group"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
