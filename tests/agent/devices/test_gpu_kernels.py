"""Which kernels a GPU works with, where Triton's own code meets what a machine may lack. The device is the CPU."""

from __future__ import annotations

import errno
import importlib
import itertools
import logging
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver
from triton.runtime import build

from tests.kernels.arithmetic.states import State, by_oracle
from tidegate.agent.devices import cuda_torch, gpu_kernels
from tidegate.agent.devices.cuda_torch import TorchCuda
from tidegate.agent.devices.gpu_kernels import load_kernels
from tidegate.kernels import implementation
from tidegate.kernels.adamw import TRITON
from tidegate.kernels.adamw.scalars import Arithmetic
from tidegate.kernels.arithmetic import oracle, self_test, torch_kernels
from tidegate.kernels.arithmetic.device_calls import GpuKernels, GradRef, Update

CPU = torch.device("cpu")
ADAMW = implementation("adamw")
IN_TORCH = ADAMW.in_torch("cpu")
"""What takes Triton's place."""
MODULE = "#include <Python.h>\nPyMODINIT_FUNC PyInit_launcher(void) { return NULL; }"
"""Like what Triton compiles before its first launch."""


class Exact:
    """Kernels that give the oracle's bits, as Triton's do on a machine that lacks nothing."""

    @staticmethod
    def update(runs: Sequence[Update]) -> None:
        for run in runs:
            weight, aux, grad = (_array(run, name) for name in ("weight", "aux", "grad"))
            moments = (_view(address, run.numel, "F32") for address in run.tensors)
            by_oracle(State(weight, aux, *moments, grad), run.weight_format, run.grad_dtype, run.scalars)

    @staticmethod
    def sum_of_squares(refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
        for i, ref in enumerate(refs):
            elements = _view(ref.address, ref.numel, ref.dtype.name)
            out_sums[i], out_bad[i] = oracle.sum_of_squares(elements, ref.dtype)


def _array(run: Update, name: str) -> Any:
    if not getattr(run, name):
        return None
    aux = f"AUX{run.weight_format.aux_bytes}"
    kind = {"weight": run.weight_format.name, "aux": aux, "grad": run.grad_dtype.name}
    return _view(getattr(run, name), run.numel, kind.get(name, "F32"))


def _view(address: int, numel: int, kind: str) -> Any:
    dtypes = {"AUX2": torch.int16, "AUX4": torch.float32, "F32": torch.float32}
    dtypes |= {"F16": torch.float16, "F16_MASTER": torch.float16}
    found = torch_kernels.wrap(address, numel, dtypes.get(kind, torch.uint16), "cpu")
    return found.numpy()


def forget_compiler_and_driver() -> None:
    driver.libcuda_dirs.cache_clear()
    if hasattr(build, "_find_compiler"):  # Triton 3.6 looks for the compiler each time
        build._find_compiler.cache_clear()


class Needy(Exact):
    """Kernels that need, at their first launch, what Triton's need."""

    @staticmethod
    def update(runs: Sequence[Update]) -> None:
        forget_compiler_and_driver()
        driver.libcuda_dirs()
        build.compile_module_from_src(MODULE, "launcher")


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()
    forget_compiler_and_driver()


@pytest.fixture(autouse=True)
def _a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def installed(monkeypatch: pytest.MonkeyPatch, triton: Any) -> None:
    """Puts this in the place of Triton's kernels. An exception is what their import raises."""

    def import_module(name: str) -> Any:
        assert name == TRITON.module
        if isinstance(triton, Exception):
            raise triton
        return triton

    monkeypatch.setattr(gpu_kernels, "importlib", SimpleNamespace(import_module=import_module))


# ---- what the machine may lack


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def compiler_named_wrongly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-cc"))


def no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: {"include": str(tmp_path)})


def no_ldconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def check_output(command: list[str]) -> bytes:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", command[0])

    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.setattr(driver.subprocess, "check_output", check_output)


def no_driver_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(driver.subprocess, "check_output", lambda _: b"")


def no_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize(
    ("lacks", "cause", "remedy"),
    [
        (no_compiler, "Failed to find C compiler", "apt-get install gcc libc6-dev python3-dev"),
        (compiler_named_wrongly, "no-cc", "name one in the variable CC"),
        (no_headers, "Python.h is missing", "apt-get install gcc libc6-dev python3-dev"),
        (no_ldconfig, "/sbin/ldconfig", "TRITON_LIBCUDA_PATH"),
        (no_driver_library, "libcuda.so cannot found", "TRITON_LIBCUDA_PATH"),
        (no_cache_folder, "Not a directory", "TRITON_CACHE_DIR"),
    ],
)
def test_what_triton_lacks_at_its_first_launch_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    lacks: Callable[[pytest.MonkeyPatch, Path], None], cause: str, remedy: str,
) -> None:  # fmt: skip
    installed(monkeypatch, Needy)
    lacks(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(CPU, ADAMW) == IN_TORCH
        assert load_kernels(CPU, ADAMW) == IN_TORCH
    (warning,) = caplog.messages
    assert cause in warning
    assert remedy in warning


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'triton'"), ImportError("Triton 3.5.1 flushes denormals: 3.6 is needed")],
)
def test_without_triton_torch_does_the_updates_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: ImportError
) -> None:
    installed(monkeypatch, error)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(CPU, ADAMW) == IN_TORCH
    (warning,) = caplog.messages
    assert str(error) in warning
    assert "pip install 'triton>=3.6'" in warning


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("a/cuda_utils.so: failed to map segment from shared object"), "not mounted noexec"),
        (OSError(errno.ENOSPC, "No space left on device"), "has room"),
        (subprocess.CalledProcessError(1, ["/sbin/ldconfig", "-p"]), "TRITON_LIBCUDA_PATH"),
        (RuntimeError("PTX was compiled with an unsupported toolchain"), "newest triton"),
    ],
)
def test_the_remedy_is_for_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, remedy: str
) -> None:
    def update(runs: Sequence[Update]) -> None:
        raise error

    installed(monkeypatch, SimpleNamespace(update=update))
    with caplog.at_level(logging.WARNING):
        load_kernels(CPU, ADAMW)
    (warning,) = caplog.messages
    assert str(error).split(":")[0] in warning
    assert remedy in warning


def test_other_bits_than_the_oracles_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Flushing(Exact):
        @staticmethod
        def update(runs: Sequence[Update]) -> None:
            Exact.update(runs)
            for run in runs:
                squares = torch_kernels.wrap(run.tensors[1], run.numel, torch.float32, "cpu")
                squares.masked_fill_(squares < torch.finfo(torch.float32).tiny, 0.0)

    installed(monkeypatch, Flushing)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(CPU, ADAMW) == IN_TORCH
    assert "differ from the reference implementation: the update of F32 weights" in caplog.text


def has_l2(run: Update) -> bool:
    return run.scalars.l2 != 0.0


def is_unaligned(run: Update) -> bool:
    return run.weight % 16 != 0


def has_another_gradient(run: Update) -> bool:
    return run.grad_dtype is not self_test.USUAL_GRADS[run.weight_format]


def is_plain_but_unaligned(run: Update) -> bool:
    return is_unaligned(run) and not has_l2(run) and not has_another_gradient(run)


def is_of_a_tail(run: Update) -> bool:
    return run.scalars.arithmetic is Arithmetic.DEEPSPEED_TAIL


@pytest.mark.parametrize(
    ("fails_for", "rule"),
    [
        *itertools.product(
            (has_l2, is_unaligned, has_another_gradient, is_plain_but_unaligned), ("adamw", "deepspeed_adamw")
        ),
        (is_of_a_tail, "deepspeed_adamw"),
    ],
)
def test_a_form_that_only_some_groups_and_layouts_ask_for_is_tried_before_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails_for: Callable[[Update], bool], rule: str
) -> None:
    """Triton compiles each form at its first launch: not in a lane's thread."""

    class Uncompiled(Exact):
        @staticmethod
        def update(runs: Sequence[Update]) -> None:
            if any(map(fails_for, runs)):
                raise RuntimeError("ptxas fatal: unsupported form")
            Exact.update(runs)

    installed(monkeypatch, Uncompiled)
    with caplog.at_level(logging.WARNING):
        assert load_kernels(CPU, implementation(rule)) == implementation(rule).in_torch("cpu")
    assert "ptxas fatal: unsupported form" in caplog.text


def test_kernels_that_run_are_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, Exact)
    with caplog.at_level(logging.DEBUG):
        assert load_kernels(CPU, ADAMW) is Exact
    assert caplog.messages == []


def test_a_sum_in_another_order_is_told() -> None:
    class Backwards(Exact):
        @staticmethod
        def sum_of_squares(refs: Sequence[GradRef], out_sums: torch.Tensor, out_bad: torch.Tensor) -> None:
            Exact.sum_of_squares(refs, out_sums, out_bad)
            out_bad[1] += 1

    kernels: Any = Backwards
    assert self_test.differences(kernels, CPU, TRITON) == ["the sum of squares of BF16 gradients"]


def test_where_torchs_own_kernels_fail_the_device_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(runs: Sequence[Update]) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    installed(monkeypatch, SimpleNamespace(update=update))
    monkeypatch.setattr(torch_kernels.TorchKernels, "update", lambda _, runs: update(runs))
    with pytest.raises(RuntimeError, match="no kernel image"):
        load_kernels(CPU, ADAMW)


def test_the_runtime_tries_its_kernels_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(cuda_torch, "load_kernels", lambda device, rule: tried.append(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    TorchCuda(torch.device("cuda:1"))
    assert tried == [torch.device("cuda:1")]


def test_both_modules_offer_what_a_device_calls() -> None:
    found: list[GpuKernels] = [importlib.import_module(TRITON.module), IN_TORCH]
    for kernels in found:
        assert callable(kernels.update)
        assert callable(kernels.sum_of_squares)
