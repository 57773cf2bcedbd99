"""Hooks on modules that belong to the optimizer, not to the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ModelHook:
    """Calls a method with `first` before its other arguments, for as long as the method's object lives.

    A module that has such hooks keeps no optimizer alive, and can be copied and pickled: what comes out has hooks that
    do nothing, because the optimizer works on the parameters of the original.
    """

    def __init__(self, method: Callable[..., Any], *first: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*self._first, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _in_a_copy, ()


def _in_a_copy() -> Callable[..., None]:
    return no_hook


def no_hook(*_: Any, **__: Any) -> None:
    """What stands for a hook in a copy."""
