"""What is put into each rank of DeepSpeed's own tests: Tidegate in every ZeRO-3 engine, and notes of what is built and
what fails. For `deepspeed_own`, which sets the environment that is read here.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

MODE, NOTES = "OWN_TESTS_MODE", "OWN_TESTS_NOTES"
"""Variables: "tidegate" or "stock"; the file where ranks write."""

UNPACED = {"h2d_bytes_per_second": 1e15, "d2h_bytes_per_second": 1e15, "update_params_per_second": 1e15}
SUBGROUPS = 8
OTHER_STAGE = "makes an engine of another stage than 3"


def in_rank(executor: type) -> None:
    """Called at the end of tests/unit/common.py, from which each rank takes `DistributedExec`."""
    import cpuinfo
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine

    # Asked for at every engine, by a process of its own for each rank: most of the time of many tests.
    processor = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: processor
    # For reductions in inference; every rank would wait for a lock to see whether it is built.
    # (deepspeed.comm has torch itself by that name.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # DeepSpeed refuses fp16 on CPUs without instructions for it, and its tests skip it then; torch does it there.
    get_accelerator().is_fp16_supported = lambda: True
    if not hasattr(DeepSpeedEngine, "sparse_tensor_module_names"):
        DeepSpeedEngine.sparse_tensor_module_names = frozenset()  # tests of up to 0.19.6 compare it
    run: Any = executor._dist_run  # type: ignore[attr-defined]

    @functools.wraps(run)
    def noted(self: Any, *args: Any) -> Any:
        try:
            return run(self, *args)
        except BaseException as error:
            # A rank that fails leaves the others waiting for it: pytest then sees nothing but that they do.
            note("failed", f"{type(error).__name__}: {error}")
            raise

    executor._dist_run = noted  # type: ignore[attr-defined]
    ours = os.environ.get(MODE) == "tidegate"
    if ours:
        import tidegate

        tidegate.enable_deepspeed()
        _whole_state_on_request()
    DeepSpeedEngine._configure_optimizer = _configured(DeepSpeedEngine._configure_optimizer, ours)


def _configured(configure: Callable[..., None], ours: bool) -> Callable[..., None]:
    @functools.wraps(configure)
    def configured(engine: Any, *args: Any, **given: Any) -> None:
        if int(engine.zero_optimization_stage()) != 3:
            pytest.skip(OTHER_STAGE)
        if ours:
            numel = sum(int(getattr(param, "ds_numel", param.numel())) for param in engine.module.parameters())
            engine.config["tidegate"] = {
                "stride": 2, "static_ratio": 0.25, "subgroup_numel": max(16, numel // SUBGROUPS), "cpu_threads": 1,
                "emulated": UNPACED,
            }  # fmt: skip
        try:
            configure(engine, *args, **given)
        except Exception as error:
            note("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            engine.config.pop("tidegate", None)
        if hasattr(engine.optimizer, "tidegate"):
            note("built", "")

    return configured


def note(what: str, message: str) -> None:
    with open(os.environ[NOTES], "a") as notes:
        notes.write(json.dumps([what, message]) + "\n")


def flags_of_ranks(flag: bool, op: Callable[[Sequence[bool]], bool] = all) -> bool:
    """In place of `reduce_boolean_flags` of tests/unit/common.py, which works with NCCL alone."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return flag
    flags = [flag] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return op(flags)


def without_device_ids(ddp: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedDataParallel as tests for GPUs make it: on CPUs it takes no devices."""

    @functools.wraps(ddp, updated=())
    def made(module: Any, device_ids: object = None, output_device: object = None, **given: Any) -> Any:
        return ddp(module, **given)

    return made


# ---- where tests look into DeepSpeed's inner optimizer


def _whole_state_on_request() -> None:
    """DeepSpeed's inner optimizer is empty under Tidegate, but while a checkpoint is written or read. Tests that call
    the two methods between which it writes its checkpoints find state there as well."""
    from tidegate.agent.integrations.deepspeed.stage3 import TidegateZeroOptimizer as Ours

    fill, clear = Ours._set_fp32_optimizer_param_groups, Ours._clear_fp32_optimizer_param_groups

    def filled(self: Any) -> None:
        if self._flats is None:
            self.shown = ExitStack()
            self.shown.enter_context(self._deepspeed_layout(filled=True, taken=False))
        fill(self)

    def cleared(self: Any) -> None:
        clear(self)
        if hasattr(self, "shown"):
            self.__dict__.pop("shown").close()

    Ours._set_fp32_optimizer_param_groups, Ours._clear_fp32_optimizer_param_groups = filled, cleared


def with_whole_state(compare: Callable[..., None]) -> Callable[..., None]:
    """One of the comparisons of tests/unit/checkpoint/common.py, with the state of both engines where it looks."""

    @functools.wraps(compare)
    def compared(saved: Any, loaded: Any, *args: Any, **given: Any) -> None:
        with _shown(saved.optimizer), _shown(loaded.optimizer):
            compare(saved, loaded, *args, **given)

    return compared


@contextmanager
def _shown(optimizer: Any) -> Iterator[None]:
    with ExitStack() as stack:
        if hasattr(optimizer, "tidegate"):
            stack.enter_context(optimizer._deepspeed_layout(filled=True, taken=False))
            assert any(flat.numel() for flat in optimizer.fp32_partitioned_groups_flat)
        yield
