"""Module hooks that do not keep the optimizer alive, and that do nothing in copies of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class ModelHook:
    """A module hook that calls `method` with the arguments `first`, followed by the arguments that torch passes to the
    hook. It holds only a weak reference to the object of `method`, and does nothing when this object no longer exists.

    A module with such hooks does not keep the optimizer alive, and can be copied and pickled. The hooks of the copy do
    nothing, because the optimizer works on the parameters of the original.
    """

    def __init__(self, method: Callable[..., Any], *first: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*self._first, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inactive_hook, ()


def _inactive_hook() -> Callable[..., None]:
    """The hook that a copied or unpickled module gets."""
    return no_hook


def no_hook(*_: Any, **__: Any) -> None:
    """Does nothing: takes the place of hooks in copied modules."""
