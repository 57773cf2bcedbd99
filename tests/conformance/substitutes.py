"""What stands in for `torch.optim.AdamW`, `Adam` and `SGD` while tests written for those run against ours.

A substitute is thin: it drops what only chooses among torch's own implementations of the same arithmetic (`foreach`,
`fused`), passes everything else on, and closes an earlier optimizer of the same parameters, which torch's tests leave
behind and Tidegate refuses. These are the stated differences; nothing else is mended here, so that what torch expects
and ours does not do shows as a failure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch.utils.weak import WeakIdKeyDictionary

import tidegate
from tests.conformance.torch_internals import common_optimizers
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
OPTIONS = ("amsgrad", "capturable", "differentiable")
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

    def begin(self) -> None:
        """Another test runs."""
        self.attempts, self.options = 0, set()

    def saw(self, params: Any, kwargs: dict[str, Any]) -> None:
        """An optimizer is to be built."""
        self.attempts += 1
        groups = [group for group in params if isinstance(group, dict)] if isinstance(params, list) else []
        for given in (kwargs, *groups):
            self.options.update(option for option in OPTIONS if given.get(option))


def option_of(kwargs: dict[str, Any]) -> str:
    """The option that sets this configuration apart, or SUPPORTED."""
    return next((option for option in OPTIONS if kwargs.get(option)), SUPPORTED)


class Closing(tidegate.AdamW):
    """Closes the earlier optimizers of its parameters; of a closed one `state_dict()` gives what it was then."""

    def __init__(self, params: Any, *args: Any, earlier: WeakIdKeyDictionary, **kwargs: Any) -> None:
        for param in _tensors(params):
            optimizer = earlier[param]() if param in earlier else None
            if optimizer is not None:
                optimizer.close()
        super().__init__(params, *args, **kwargs)
        for group in self.param_groups:
            for param in group["params"]:
                earlier[param] = weakref.ref(self)

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__.get("_last_state") or super().state_dict()

    def close(self) -> None:
        if self.engine.usable and "_last_state" not in self.__dict__:
            self._last_state = super().state_dict()
            params = [param for group in self.param_groups for param in group["params"]]
            self._state = {params[number]: values for number, values in self._last_state["state"].items()}
        super().close()


def classes_of_tidegate(watch: Watch) -> dict[str, type[Optimizer]]:
    earlier = WeakIdKeyDictionary()

    def build(name: str, reference: type[Optimizer], **fixed: Any) -> type[Optimizer]:
        def new(cls: type[Optimizer], params: Any, *args: Any, **kwargs: Any) -> Optimizer:
            if watch.reference is not None and kwargs.get(watch.reference) is False:
                return reference(params, *args, **kwargs)
            return object.__new__(cls)

        def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            given = _listed(params)
            watch.saw(given, kwargs)
            if isinstance(given, list):
                given = [_plain(group) if isinstance(group, dict) else group for group in given]
            settings = {"offload": OFFLOAD, **fixed, **_plain(kwargs)}
            Closing.__init__(self, given, *args, earlier=earlier, **settings)

        return type(name, (Closing,), {"__new__": new, "__init__": init})

    return {
        "AdamW": build("AdamW", torch.optim.AdamW),
        "Adam": build("Adam", torch.optim.Adam, decoupled=False, weight_decay=0.0),
        "SGD": build("SGD", torch.optim.AdamW),
    }


def classes_of_torch(watch: Watch) -> dict[str, type[Optimizer]]:
    """The control: the same tests and the same substitution of SGD, with torch's own AdamW."""

    def watched(name: str, base: type[Optimizer]) -> type[Optimizer]:
        def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            given = _listed(params)
            watch.saw(given, kwargs)
            dropped = SGD_ONLY if name == "SGD" else ()
            base.__init__(self, given, *args, **{k: v for k, v in kwargs.items() if k not in dropped})

        return type(name, (base,), {"__init__": init})

    return {
        "AdamW": watched("AdamW", torch.optim.AdamW),
        "Adam": watched("Adam", torch.optim.Adam),
        "SGD": watched("SGD", torch.optim.AdamW),
    }


def cpu_offload(base: type[Optimizer]) -> type[Optimizer]:
    """`torchao.optim.CPUOffloadOptimizer`; its `offload_gradients` is our gradients="release"."""

    def init(
        self: Any, params: Any, optimizer_class: type[Optimizer] | None = None, *, offload_gradients: bool = False
    ) -> None:
        ours = issubclass(base, tidegate.AdamW)
        released: dict[str, Any] = (
            {"offload": replace(OFFLOAD, gradients="release")} if offload_gradients and ours else {}
        )
        base.__init__(self, params, **released)

    return type("CPUOffloadOptimizer", (base,), {"__init__": init})


Classes = Callable[[Watch], dict[str, type[Optimizer]]]


@contextmanager
def in_torch_optim(
    classes: dict[str, type[Optimizer]], names: Sequence[str] = ("SGD", "Adam", "AdamW")
) -> Iterator[None]:
    """`torch.optim.AdamW` and its siblings are these, for what looks them up there or imports them."""
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch(f"torch.optim.{name}", classes[name]))
        yield


@contextmanager
def in_optim_db(classes: dict[str, type[Optimizer]]) -> Iterator[None]:
    """The list from which torch generates its optimizer tests holds only Adam and AdamW, and those are these."""
    optim_db = common_optimizers().optim_db
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


def _listed(params: Any) -> Any:
    """What a generator gives, also inside groups: it is looked at more than once."""
    if isinstance(params, torch.Tensor) or params is None:
        return params
    given = list(params)
    for group in given:
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
            group["params"] = list(group["params"])
    return given


def _tensors(params: Any) -> Iterator[torch.Tensor]:
    if isinstance(params, torch.Tensor) or params is None:
        return
    for entry in params:
        inner = entry["params"] if isinstance(entry, dict) else [entry]
        for one in [inner] if isinstance(inner, torch.Tensor) else inner:
            yield one[1] if isinstance(one, tuple) else one
