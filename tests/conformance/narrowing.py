"""Which part of what torch's tests loop over runs: a test stops at its first failure, and would hide the others."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.conformance.substitutes import OPTIONS, SUPPORTED, option_of
from tests.conformance.torch_internals import common_optimizers

INPUTS = "_get_optim_inputs_including_global_cliquey_kwargs"

Part = tuple[str, AbstractContextManager[None]]


def each_option(module: types.ModuleType) -> Iterator[Part]:
    """The configurations that ours has too, then those of one refused option at a time."""
    for option in (SUPPORTED, *OPTIONS):
        yield option, _only_option(module, option)


def each_error() -> Iterator[Part]:
    """One misuse at a time."""
    asked = common_optimizers().optim_db[0].optim_error_inputs_func("cpu", None)
    seen: dict[str, int] = {}
    for number, error in enumerate(asked):
        desc = error.optimizer_error_input.desc
        seen[desc] = seen.get(desc, 0) + 1
        yield desc if seen[desc] == 1 else f"{desc}, {seen[desc]}", _only_error(number)


@contextmanager
def _only_option(module: types.ModuleType, option: str) -> Iterator[None]:
    # What is differentiable is never in the lists themselves, only in what the module adds to them.
    base = SUPPORTED if option == "differentiable" else option
    every = getattr(module, INPUTS)
    setattr(module, INPUTS, lambda *a, **k: [i for i in every(*a, **k) if option_of(i.kwargs) == option])
    try:
        with _changed("optim_inputs_func", lambda found: [i for i in found if option_of(i.kwargs) == base]):
            yield
    finally:
        setattr(module, INPUTS, every)


@contextmanager
def _only_error(number: int) -> Iterator[None]:
    with _changed("optim_error_inputs_func", lambda found: [found[number]]):
        yield


@contextmanager
def _changed(name: str, change: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """This list of inputs of every optimizer is changed before a test gets it."""
    optim_db = common_optimizers().optim_db
    own = [getattr(info, name) for info in optim_db]

    def changed(inputs: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args, **kwargs: change(inputs(*args, **kwargs))

    for info, inputs in zip(optim_db, own, strict=True):
        setattr(info, name, changed(inputs))
    try:
        yield
    finally:
        for info, inputs in zip(optim_db, own, strict=True):
            setattr(info, name, inputs)
