"""`optimizer.state` as a lazy view of the offloaded state. It has the same entries as in torch, but the tensors in them
have no memory of their own: each read loads the values.

Iteration yields `step` and the tensors of the update rule for each parameter that was updated, and for 16-bit weights
also `remainder` or `master`, which complete them to fp32. A tensor can be read, and can be assigned to its own key
without effect. Emptying an entry, or all entries, resets the state. All other writes raise ConfigError, because they
would be lost.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import torch

from tidegate.agent.parameters.shards import is_divided, shard_of, wrap_like
from tidegate.errors import ConfigError

REMEDY = (
    "The state is in the engine, and optimizer.state is a view of it. To change it, take state = "
    "optimizer.state_dict(), change this copy, and call optimizer.load_state_dict(state). To reset it, call "
    "optimizer.state.clear()."
)

UNDECLARED_VIEW_OPS = (torch.ops.aten.unsafe_split.Tensor, torch.ops.aten.unsafe_split_with_sizes.default)
"""Operations whose results share memory with their input, although their schemas do not say so."""


class StateOwner(Protocol):
    """The optimizer that a state view belongs to."""

    def _read_state(self, param: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """All state of this parameter, in the form of `state_dict`."""

    def _reset_state(self, params: Collection[torch.Tensor] | None) -> None:
        """Resets the state of these parameters, or of all parameters for None."""


class OffloadedTensor(torch.Tensor):
    """A tensor of the state, or a view of such a tensor, without memory: each read loads the values from where they are
    stored. Its device is the CPU; moving it to another device returns the same object, because the engine decides where
    state is stored."""

    _read: Callable[[], torch.Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> OffloadedTensor:
        """Creates the tensor, which has no memory of its own.

        like: tensor with the same shape and strides. dtype: dtype of the new tensor. read: function that loads the
        values.
        """
        made: OffloadedTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=torch.device("cpu")
        )
        made._read = read
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            return args[0]
        if (func.is_view or func in UNDECLARED_VIEW_OPS) and isinstance(args[0], cls):
            return cls._view(func, args, kwargs)
        for place, argument in enumerate(func._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and _has_state_tensor(given):
                raise ConfigError(f"{func} would write to a tensor of optimizer.state. {REMEDY}")
        return func(*map(_with_values, args), **{name: _with_values(value) for name, value in kwargs.items()})

    @classmethod
    def _view(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a view operation: a lazy and read-only view of the same tensor of the state. Some operations
        return a list of views."""
        whole = args[0]
        like = torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")

        def read(number: int | None = None) -> torch.Tensor:
            made = func(whole._read(), *args[1:], **kwargs)
            viewed: torch.Tensor = made if number is None else made[number]
            return viewed

        shown = func(like, *args[1:], **kwargs)
        if isinstance(shown, torch.Tensor):
            return cls(shown, shown.dtype, read)
        return [cls(view, view.dtype, partial(read, number)) for number, view in enumerate(shown)]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, _: torch.Tensor) -> None:
        raise ConfigError(f"An assignment to .data would not change the state. {REMEDY}")

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only NumPy array with a copy of the values."""
        array = self._read().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self._read().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OffloadedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._read()


def _has_state_tensor(given: Any) -> bool:
    """Whether an argument, or an element of it, is a tensor of the state."""
    return any(isinstance(value, OffloadedTensor) for value in (given if isinstance(given, (list, tuple)) else [given]))


def _with_values(value: Any) -> Any:
    """Replaces lazy tensors of the state by their values, also in lists, tuples and DTensors; returns any other value
    unchanged."""
    if isinstance(value, OffloadedTensor):
        return value._read()
    if is_divided(value):
        return wrap_like(value, _with_values(shard_of(value)))
    return type(value)(map(_with_values, value)) if isinstance(value, (list, tuple)) else value


def _is_same(one: Any, other: Any) -> bool:
    """Whether `one` and `other` are the same tensor of the state. DTensors are compared by their shards, because moving
    a DTensor makes a new object."""
    return one is other or (is_divided(one) and is_divided(other) and shard_of(one) is shard_of(other))


class StateEntry(dict[str, Any]):
    """The entry of one parameter in `optimizer.state`. Users may add keys; the keys of the engine cannot be changed."""

    def __init__(self, engine_keys: Collection[str], values: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__(values)
        self._engine_keys = engine_keys

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._engine_keys:
            _refuse_unless(_is_same(self.get(name), value), f"state[parameter][{name!r}] = …")
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        _refuse_unless(name not in self._engine_keys, f"del state[parameter][{name!r}]")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        _refuse_unless(name not in self._engine_keys or name not in self, f"state[parameter].pop({name!r})")
        return super().pop(name, *default)

    def popitem(self) -> NoReturn:
        _refuse_unless(False, "state[parameter].popitem()")
        raise AssertionError

    def clear(self) -> None:
        _refuse_unless(not any(name in self._engine_keys for name in self), "state[parameter].clear()")
        super().clear()

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> StateEntry:  # type: ignore[override, misc]
        self.update(given)
        return self

    def user_entries(self) -> dict[str, Any]:
        """The user's own entries."""
        return user_entries(self, self._engine_keys)

    def __reduce__(self) -> Any:
        return dict, (list(self.items()),)


class OffloadedState(defaultdict[Any, Any]):
    """The dictionary `optimizer.state`. Keys that are not parameters belong to the user."""

    def __init__(self, owner: StateOwner, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes`: the dtypes of the entries that belong to the engine, by key. Other keys are the user's."""
        super().__init__(dict)
        self._owner, self._dtypes = weakref.ref(owner), dtypes

    # ---- for the optimizer

    def set_entry(self, param: torch.Tensor, names: Collection[str]) -> None:
        """Sets the entry of a parameter that was updated: lazy tensors with these names."""
        entry = super().setdefault(param, StateEntry(self._dtypes))
        for name in names:
            dict.__setitem__(entry, name, self._lazy(param, name))

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Removes the engine's keys from the entries of these parameters; the user's keys stay."""
        for param in params:
            entry = self.get(param, {})
            for name in set(entry) & set(self._dtypes):
                dict.__delitem__(entry, name)

    def reset_entries(self, users: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Removes the state of all parameters, then sets the user's own entries (`users`, by parameter)."""
        for key in [key for key in self if isinstance(key, torch.Tensor)]:
            super().__delitem__(key)
        for param, values in users.items():
            if values:
                super().__setitem__(param, StateEntry(self._dtypes, values))

    def user_entries(self, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
        """The user's own entries of each of these parameters."""
        return {param: self[param].user_entries() for param in params if param in self}

    def with_values(self, values: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[Any, Any]:
        """The whole state as a dictionary, with `values` in place of the lazy tensors. Parameters that are not in
        `values` have no state and are left out."""
        others = {key: value for key, value in self.items() if not isinstance(key, torch.Tensor)}
        return others | {param: {**self[param].user_entries(), **own} for param, own in values.items()}

    def take_others(self, given: Mapping[Any, Any]) -> None:
        """Replaces the entries whose keys are not parameters by those of a loaded state."""
        for key in [key for key in self if not isinstance(key, torch.Tensor)]:
            super().__delitem__(key)
        for key, value in given.items():
            super().__setitem__(key, value)

    def _lazy(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A lazy tensor of the state; for a DTensor parameter, a DTensor with a lazy shard."""
        owner, param_ref = self._owner, weakref.ref(param)

        def read() -> torch.Tensor:
            optimizer, whole = owner(), param_ref()
            if optimizer is None or whole is None:
                raise ConfigError(
                    "The optimizer of this state no longer exists: call its state_dict() while you still hold it."
                )
            return shard_of(optimizer._read_state(whole)[name])

        if name == "step":
            return OffloadedTensor(torch.empty((), device="meta"), self._dtypes[name], read)
        like = torch.empty_like(shard_of(param), device="meta")
        return wrap_like(param, OffloadedTensor(like, self._dtypes[name], read))

    # ---- for users

    def __missing__(self, key: Any) -> Any:
        entry: dict[str, Any] = StateEntry(self._dtypes) if isinstance(key, torch.Tensor) else {}
        super().__setitem__(key, entry)
        return entry

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, torch.Tensor):
            super().__setitem__(key, value)
            return
        now = self.get(key, {})
        if value is now:
            return
        theirs = {name: given for name, given in value.items() if name in self._dtypes}
        if any(name in self._dtypes for name in now) and not theirs:
            self._reset([key])
        else:
            mine = {name: kept for name, kept in now.items() if name in self._dtypes}
            same = theirs.keys() == mine.keys() and all(_is_same(theirs[name], mine[name]) for name in mine)
            _refuse_unless(same, "state[parameter] = {…}")
        entry = self[key]
        for name in set(entry) - set(value) - set(self._dtypes):
            del entry[name]
        entry.update(user_entries(value, self._dtypes))

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, torch.Tensor) and key in self:
            self._reset([key])
            super().pop(key, None)
        else:
            super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        entry = (
            {name: _with_values(value) for name, value in self[key].items()}
            if isinstance(key, torch.Tensor)
            else self[key]
        )
        del self[key]
        return entry

    def popitem(self) -> tuple[Any, Any]:
        if not self:
            raise KeyError("popitem(): dictionary is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        self._reset(None)
        super().clear()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value

    def __ior__(self, given: Any) -> OffloadedState:  # type: ignore[misc]
        self.update(given)
        return self

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict, self)

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.copy()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def replace(self, given: Mapping[Any, Any]) -> None:
        """Implements `optimizer.state = given`. Unchanged entries have no effect; the state of parameters that are
        missing in `given` is reset. Raises ConfigError for changed tensors of the state."""
        if given is self:
            return
        gone = [key for key in self if key not in given]
        if not given:
            self.clear()
            return
        for key in gone:
            del self[key]
        self.update(given)

    def _reset(self, params: list[torch.Tensor] | None) -> None:
        owner = self._owner()
        if owner is not None:
            owner._reset_state(params)


def user_entries(entry: Mapping[str, Any], engine_keys: Collection[str]) -> dict[str, Any]:
    """The entries of a parameter's state that belong to the user, not to the engine."""
    return {name: value for name, value in entry.items() if name not in engine_keys}


def _refuse_unless(allowed: bool, what: str) -> None:
    if not allowed:
        raise ConfigError(f"{what} would not change the state. {REMEDY}")
