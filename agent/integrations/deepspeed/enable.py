"""Enables Tidegate in DeepSpeed ZeRO-3 by its JSON: call `tidegate.enable_deepspeed()` once, and add a top-level
`"tidegate": {…}` block.

    import tidegate
    tidegate.enable_deepspeed()
    engine, *_ = deepspeed.initialize(model=model, config="ds.json", …)

Configurations without the block behave as before. `close()` of the handle that `enable_deepspeed` returns disables
Tidegate again.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from tidegate.agent.control.attach import attach
from tidegate.agent.integrations.deepspeed import support as support
from tidegate.agent.integrations.deepspeed.settings import Settings, block_of, settings_of
from tidegate.errors import ConfigError

log = logging.getLogger("tidegate")

SUBCLASS_MODULES: Final = ("deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.mics")
"""DeepSpeed's modules that define subclasses of ZeRO-3's optimizer. They are imported before the class is replaced:
their classes then inherit from DeepSpeed's class and not from Tidegate's."""


_open_handles: set[DeepSpeedIntegration] = set()
"""Handles that `enable_deepspeed` has returned and that are not closed. While there is one, Tidegate is enabled."""
_replaced: dict[Callable[..., None], Callable[..., None]] = {}
"""Maps each replacement function of Tidegate to the DeepSpeed function that it replaces."""


class DeepSpeedIntegration:
    """Handle that keeps Tidegate enabled in DeepSpeed. Made by `enable_deepspeed`; ended by `close()` or a `with`
    block. While it is open, `deepspeed.initialize` may raise ConfigError (see `enable_deepspeed`)."""

    def __init__(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        configure = DeepSpeedEngine._configure_optimizer
        if not hasattr(configure, "_tidegate"):  # a wrapper that another library put around ours has it, too
            ours = _with_tidegate(configure)
            _replaced[ours] = configure
            DeepSpeedEngine._configure_optimizer = ours
        _open_handles.add(self)

    def close(self) -> None:
        """Disables Tidegate in DeepSpeed. `deepspeed.initialize` then builds DeepSpeed's own optimizer, even if the
        configuration has a `"tidegate"` block. If several handles are open, this happens when the last one is closed.
        Existing engines keep their optimizer. Idempotent."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        _open_handles.discard(self)
        # A wrapper that another library has put around our function stays; ours then calls DeepSpeed's at once.
        if not _open_handles and (own := _replaced.pop(DeepSpeedEngine._configure_optimizer, None)) is not None:
            DeepSpeedEngine._configure_optimizer = own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enable_deepspeed() -> DeepSpeedIntegration:
    """Makes `deepspeed.initialize` use Tidegate for the optimizer state of ZeRO-3 runs whose configuration has a
    `"tidegate"` block. Call it before `deepspeed.initialize`. `close()` of the returned handle disables Tidegate again;
    if it is not called, Tidegate stays enabled until the process ends.

    With such a block, `deepspeed.initialize` raises ConfigError for settings that cannot work, and for a DeepSpeed that
    differs from the tested releases; the message lists the differences. With `"fallback": true` in the block, it logs a
    warning instead and continues without Tidegate.

    Raises ImportError if DeepSpeed is not installed.
    """
    return DeepSpeedIntegration()


def _with_tidegate(configure: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(configure)
    def configured(engine: Any, *args: Any, **given: Any) -> None:
        block = block_of(engine.config) if _open_handles else None
        settings = Settings(enabled=False) if block is None else settings_of(block, engine.config)
        if not settings.enabled or not _check_compatible(_incompatibilities(engine), settings):
            configure(engine, *args, **given)
            return
        _make_nvme_path(engine, settings)
        with _swapping_disabled(engine) as restore, _optimizer_class_replaced(settings, restore):
            configure(engine, *args, **given)
        optimizer = getattr(engine.optimizer, "tidegate", None)
        if optimizer is not None and settings.attach:
            attach(optimizer, engine.module, **settings.attach)

    configured._tidegate = True  # type: ignore[attr-defined]
    return configured


def _incompatibilities(engine: Any) -> list[str]:
    import deepspeed

    stage3 = importlib.import_module("deepspeed.runtime.zero.stage3")
    differences = support.differences(stage3.DeepSpeedZeroOptimizer_Stage3, deepspeed.__version__)
    return [*differences, *support.unsupported_settings(engine)]


def _check_compatible(obstacles: list[str], settings: Settings) -> bool:
    """Returns True if `obstacles`, the list of incompatibilities, is empty. Otherwise raises ConfigError or, with
    `fallback`, logs a warning and returns False."""
    if not obstacles:
        return True
    reasons = "\n".join(f"- {obstacle}" for obstacle in obstacles)
    if not settings.fallback:
        raise ConfigError(f"Tidegate cannot work with this DeepSpeed run:\n{reasons}")
    log.warning("Tidegate cannot work with this DeepSpeed run, which continues without it (fallback):\n%s", reasons)
    return False


def _make_nvme_path(engine: Any, settings: Settings) -> None:
    """Creates the folder of DeepSpeed's setting `nvme_path`, as DeepSpeed would do, if Tidegate uses that folder as a
    path."""
    offload = engine._config.zero_config.offload_optimizer
    given = settings.offload.paths.get("nvme")
    if offload is not None and offload.nvme_path is not None and isinstance(given, str):
        folder = Path(offload.nvme_path)
        if folder == Path(given):
            folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _swapping_disabled(engine: Any) -> Iterator[Callable[[], Any]]:
    """Context manager that changes DeepSpeed's device for optimizer state from "nvme" to "cpu". Otherwise DeepSpeed
    would look for the state in its swap files, but Tidegate stores the state. Yields a function that restores the
    original setting and returns it. At the end of the block, the setting is restored only if the block raised;
    otherwise the change remains."""
    zero = engine._config.zero_config
    given = zero.offload_optimizer
    if engine.zero_nvme_offload_optimizer():
        zero.offload_optimizer = given.model_copy(update={"device": "cpu"})

    def restore() -> Any:
        zero.offload_optimizer = given
        return given

    try:
        yield restore
    except BaseException:
        restore()
        raise


@contextmanager
def _optimizer_class_replaced(settings: Settings, restore: Callable[[], Any]) -> Iterator[None]:
    """Context manager in which DeepSpeed creates Tidegate's optimizer in place of ZeRO-3's. `restore`: the function
    that `_swapping_disabled` yields, for the fallback to DeepSpeed's own optimizer."""
    stage3: Any = importlib.import_module("deepspeed.runtime.zero.stage3")
    for module in SUBCLASS_MODULES:
        with suppress(ImportError):
            importlib.import_module(module)
    from tidegate.agent.integrations.deepspeed.stage3 import TidegateZeroOptimizer

    original = stage3.DeepSpeedZeroOptimizer_Stage3

    def build(module: Any, init_optimizer: Any, *args: Any, **given: Any) -> Any:
        if not _check_compatible(support.unsupported_optimizer(init_optimizer), settings):
            return original(module, init_optimizer, *args, **{**given, "offload_optimizer_config": restore()})
        return TidegateZeroOptimizer(settings.offload, module, init_optimizer, *args, **given)

    stage3.DeepSpeedZeroOptimizer_Stage3 = build
    try:
        yield
    finally:
        stage3.DeepSpeedZeroOptimizer_Stage3 = original
