"""Counts the registers and register spills of each Triton kernel, in every variant that Tidegate can launch, for
several GPU architectures. No GPU is needed.

The bench calls Tidegate's own functions, with launches replaced by compilations, and reads the compiler's report (ptxas
-v). Prints one line for each variant, or with --json one object. Exit status 1 if any kernel spills registers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import triton_adamw
from tidegate.kernels.adamw.scalars import Arithmetic, scalars
from tidegate.kernels.arithmetic import triton_kernels
from tidegate.kernels.arithmetic.device_calls import GradRef, Update

CAPABILITIES = (80, 90, 100, 120)
ADDRESS = 0x7F00_0000_0000
"""An address such as those of GPU memory. It is never accessed, because nothing is launched."""
Call = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """The compiler's report on one kernel: its name, variant (`form`), GPU architecture (`capability`: 80 is sm_80),
    and its registers, spilled bytes and stack bytes."""

    kernel: str
    form: str
    capability: int
    registers: int
    spilled_bytes: int
    """Bytes of spill stores plus spill loads."""
    stack_bytes: int


@dataclass(frozen=True)
class Bound:
    """Triton's interpretation of the arguments of one launch: their types, constants and attributes (such as
    alignment)."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    attributes: str


class _Target:
    """Replacement of Triton's driver, for a GPU that is not present: it only knows the architecture."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Context in which launches of kernels only compile them, for this architecture."""

    def no_launch(kernel: Any, grid: Any) -> Any:
        return functools.partial(kernel.run, grid=grid, warmup=True)

    before, launch = driver._active, JITFunction.__getitem__
    driver.set_active(_Target(capability))
    JITFunction.__getitem__ = no_launch
    try:
        yield
    finally:
        driver._active, JITFunction.__getitem__ = before, launch
        for kernel in (triton_adamw._adamw, triton_kernels._block_sums, triton_kernels._trees):
            kernel.device_caches.clear()


def bound(call: Call, capability: int = 90) -> list[Bound]:
    """The launches that `call` would make. Nothing is compiled."""
    found: list[Bound] = []

    def seen(*, compile: Any, fn: Any, **_: Any) -> bool:
        names = fn.jit_function.arg_names
        signature, constants = compile["signature"], compile["constants"]
        named = tuple((names[place[0]], value) for place, value in constants.items())
        found.append(Bound(fn.name, tuple(signature.items()), named, str(compile["configs"])))
        return True

    with compiling_for(capability), _set(knobs.runtime, "jit_cache_hook", seen):
        call()
    return found


def rows(call: Call, form: str, capability: int) -> list[Row]:
    """Compiles the kernels that `call` launches, and returns their figures."""
    report = io.StringIO()
    with (
        compiling_for(capability), _set(knobs.nvidia, "dump_ptxas_log", True),
        _set(knobs.compilation, "always_compile", True), contextlib.redirect_stdout(report),
    ):  # fmt: skip
        call()
    return list(_parsed(report.getvalue(), form, capability))


def _parsed(report: str, form: str, capability: int) -> Iterator[Row]:
    entry = re.compile(
        r"Function properties for (\w+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    for kernel, stack, stored, loaded, registers in entry.findall(report):
        yield Row(kernel, form, capability, int(registers), int(stored) + int(loaded), int(stack))


def forms() -> Iterator[tuple[str, Call]]:
    """Every variant of every kernel: its description, and a call that launches it."""
    for weight, grad, arithmetic in itertools.product(WeightFormat, GradDtype, Arithmetic):
        for kind, aligned in itertools.product(("AdamW", "Adam", "no decay"), (True, False)):
            if kind != "no decay" or arithmetic is not Arithmetic.TORCH:
                words = (weight.name, grad.name, arithmetic.name, kind, "aligned" if aligned else "unaligned")
                yield " ".join(words), functools.partial(_update, weight, grad, arithmetic, kind, aligned)
    for grad in GradDtype:
        yield f"sum of {grad.name}", functools.partial(sum_of, grad)


def _update(weight: WeightFormat, grad: GradDtype, arithmetic: Arithmetic, kind: str, aligned: bool) -> None:
    triton_adamw.update([update_of(1000, weight, grad, arithmetic, kind, ADDRESS + (0 if aligned else 2))])


def update_of(
    numel: int, weight: WeightFormat, grad: GradDtype, arithmetic: Arithmetic, kind: str, address: int
) -> Update:
    """The arguments of an update with all arrays at the same `address`. kind: "AdamW", "Adam", or "no decay"."""
    values = scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step=3, decoupled=kind == "AdamW")
    if kind == "no decay":
        values = replace(values, l2=0.0)
    decay = values.decay if arithmetic is Arithmetic.TORCH else 1e-4 if kind == "AdamW" else 0.0
    values = replace(values, arithmetic=arithmetic, decay=decay)
    aux = address if weight.aux_bytes else 0
    return Update(numel, address, weight, aux, (address, address), address, grad, values)


def sum_of(grad: GradDtype, numel: int = 1000) -> None:
    sums, bad = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
    triton_kernels.sum_of_squares([GradRef(ADDRESS, numel, grad)], sums, bad)


@contextlib.contextmanager
def _set(place: Any, name: str, value: Any) -> Iterator[None]:
    with place.scope():
        setattr(place, name, value)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES, help="80 is sm_80")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found: list[Row] = []
    for capability, (form, call) in itertools.product(options.capabilities, forms()):
        for row in rows(call, form, capability):
            found.append(row)
            if not options.json:
                print(
                    f"sm_{row.capability:<4} {row.kernel:12} {row.form:50} {row.registers:4} registers "
                    f"{row.spilled_bytes:4} bytes spilled {row.stack_bytes:4} bytes of stack",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in found]}))
    return 1 if any(row.spilled_bytes for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
