"""What stands in for `torch.optim.AdamW`, `Adam` and `SGD` while tests written for those run against ours.

A substitute is thin: it drops what only chooses among torch's own implementations of the same arithmetic (`foreach`,
`fused`), passes everything else on, and closes an earlier optimizer of the same parameters, which torch's tests leave
behind and Tidegate refuses. These are the stated differences; nothing else is mended here, so that what torch expects
and ours does not do shows as a failure.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils.weak import WeakIdKeyDictionary

import tidegate
from tidegate.agent.devices.emulated import EmulatedRates

Optimizer = torch.optim.Optimizer

OFFLOAD = tidegate.Offload(
    stride=2.0,
    static_ratio=0.25,
    subgroup_numel=1000,
    device="emulated",
    cpu_threads=1,
    emulated=EmulatedRates(h2d_bytes_per_second=1e12, d2h_bytes_per_second=1e12, update_params_per_second=1e12),
)
SUPPORTED = "as ours"
OPTIONS = ("maximize", "amsgrad", "capturable", "differentiable")
"""Options of torch's AdamW that change what it does. Each is tried on its own, apart from what ours has too."""
IMPLEMENTATIONS = ("foreach", "fused")
SGD_ONLY = ("momentum", "dampening", "nesterov")


@dataclass
class Watch:
    """What the substitutes see while one test runs."""

    attempts: int = 0
    options: set[str] = field(default_factory=set)
    reference: str | None = None
    """`fused` or `foreach`: with this option False torch's own class is built, so that ours is compared with it."""

    def saw(self, kwargs: dict[str, Any]) -> None:
        self.attempts += 1
        self.options.update(option for option in OPTIONS if kwargs.get(option))


def option_of(kwargs: dict[str, Any]) -> str:
    """The option that sets this configuration apart, or SUPPORTED."""
    return next((option for option in OPTIONS if kwargs.get(option)), SUPPORTED)


class Gathered(defaultdict[Any, Any]):
    """Ours leaves `optimizer.state` empty, its state lives elsewhere: this answers `state[param]` by `state_dict()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self.optimizer = weakref.ref(optimizer)

    def __missing__(self, key: Any) -> Any:
        optimizer = self.optimizer()
        if optimizer is None or not isinstance(key, torch.Tensor):
            return super().__missing__(key)
        order = [id(p) for group in optimizer.param_groups for p in group["params"]]
        return optimizer.state_dict()["state"].get(order.index(id(key)), {})


def classes_of_tidegate(watch: Watch) -> dict[str, type[Optimizer]]:
    earlier = WeakIdKeyDictionary()

    def release(params: list[Any]) -> None:
        for param in _tensors(params):
            optimizer = earlier.get(param)
            if optimizer is not None and optimizer() is not None:
                optimizer().close()

    def remember(optimizer: tidegate.AdamW) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                earlier[param] = weakref.ref(optimizer)

    def build(name: str, reference: type[Optimizer], **fixed: Any) -> type[Optimizer]:
        def new(cls: type[Optimizer], params: Any, *args: Any, **kwargs: Any) -> Optimizer:
            if watch.reference is not None and kwargs.get(watch.reference) is False:
                return reference(params, *args, **kwargs)
            return object.__new__(cls)

        def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            watch.saw(kwargs)
            given: Any = params if isinstance(params, torch.Tensor) or params is None else list(params)
            if isinstance(given, list):
                for group in given:
                    if isinstance(group, dict):
                        watch.options.update(option for option in OPTIONS if group.get(option))
                release(given)
                given = [_plain(group) if isinstance(group, dict) else group for group in given]
            tidegate.AdamW.__init__(self, given, *args, **{"offload": OFFLOAD, **fixed, **_plain(kwargs)})
            self.state = Gathered(self)
            remember(self)

        return type(name, (tidegate.AdamW,), {"__new__": new, "__init__": init})

    return {
        "AdamW": build("AdamW", torch.optim.AdamW),
        "Adam": build("Adam", torch.optim.Adam, decoupled=False, weight_decay=0.0),
        "SGD": build("SGD", torch.optim.AdamW),
    }


def classes_of_torch(watch: Watch) -> dict[str, type[Optimizer]]:
    """The control: the same tests and the same substitution of SGD, with torch's own AdamW."""

    def watched(name: str, base: type[Optimizer]) -> type[Optimizer]:
        def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            watch.saw(kwargs)
            if not isinstance(params, torch.Tensor) and params is not None:
                params = list(params)
                for group in params:
                    if isinstance(group, dict):
                        watch.options.update(option for option in OPTIONS if group.get(option))
            dropped = SGD_ONLY if name == "SGD" else ()
            base.__init__(self, params, *args, **{k: v for k, v in kwargs.items() if k not in dropped})

        return type(name, (base,), {"__init__": init})

    return {
        "AdamW": watched("AdamW", torch.optim.AdamW),
        "Adam": watched("Adam", torch.optim.Adam),
        "SGD": watched("SGD", torch.optim.AdamW),
    }


Classes = Callable[[Watch], dict[str, type[Optimizer]]]


@contextmanager
def in_torch_optim(classes: dict[str, type[Optimizer]]) -> Iterator[None]:
    """`torch.optim.AdamW` and its siblings are these, for what looks them up there or imports them."""
    with ExitStack() as patches:
        for name, cls in classes.items():
            patches.enter_context(mock.patch(f"torch.optim.{name}", cls))
        yield


@contextmanager
def in_optim_db(classes: dict[str, type[Optimizer]]) -> Iterator[None]:
    """The list from which torch generates its optimizer tests holds only Adam and AdamW, and those are these."""
    from torch.testing._internal.common_optimizers import optim_db

    everything = list(optim_db)
    kept: list[Any] = [info for info in everything if info.name in ("Adam", "AdamW")]
    own = [info.optim_cls for info in kept]
    optim_db[:] = kept
    for info in kept:
        info.optim_cls = classes[info.name]
    try:
        yield
    finally:
        for info, cls in zip(kept, own, strict=True):
            info.optim_cls = cls
        optim_db[:] = everything


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Without what ours has no word for: implementations, options that are off, SGD's momentum."""
    return {
        key: value
        for key, value in given.items()
        if key not in IMPLEMENTATIONS and key not in SGD_ONLY and not (key in OPTIONS and not value)
    }


def _tensors(params: list[Any]) -> Iterator[torch.Tensor]:
    for entry in params:
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, tuple):
            yield from _tensors([entry[1]])
        elif isinstance(entry, dict):
            inner = entry["params"]
            if not isinstance(inner, (torch.Tensor, list, tuple)):
                inner = entry["params"] = list(inner)
            yield from _tensors([inner] if isinstance(inner, torch.Tensor) else list(inner))
