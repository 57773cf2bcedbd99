"""The Triton kernels without a GPU: results in Triton's interpreter, rounding in the code compiled for one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import triton_adamw
from tidegate.kernels.adamw.scalars import SCALAR_NAMES, Arithmetic
from tidegate.kernels.arithmetic import triton_kernels

FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
DTYPES = pytest.mark.parametrize("grad_dtype", list(GradDtype))
FEW_DTYPES = pytest.mark.parametrize(
    "grad_dtype", [pytest.param(d, marks=() if d is GradDtype.BF16 else pytest.mark.slow) for d in GradDtype]
)
ADDRESSES = ("weight", "aux", "exp_avg", "exp_avg_sq", "grad")
Signature = dict[str, str]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any, signature: Signature, constants: dict[str, int], capability: int = 90, **options: Any
) -> dict[str, str]:
    """What the compiler makes of a kernel, stage by stage, for a GPU that need not be there."""
    keys = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), keys)
    asm = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    return {stage: str(asm[stage]) for stage in ("ttir", "ptx")}


def adamw(
    weight_format: WeightFormat, grad_dtype: GradDtype, aligned: bool = True, capability: int = 90,
    arithmetic: Arithmetic = Arithmetic.TORCH, **options: Any,
) -> dict[str, str]:  # fmt: skip
    signature = {"numel": "i64", **dict.fromkeys(ADDRESSES, "i64"), **dict.fromkeys(SCALAR_NAMES, "fp32")}
    constants = {"FORMAT": weight_format, "GRAD": grad_dtype, "ARITHMETIC": arithmetic, "L2": True, "DECAY": True}
    constants |= {"ALIGNED": aligned, "BLOCK": triton_adamw.ELEMENTS_PER_PROGRAM}
    constants = {name: int(value) for name, value in constants.items()}
    return compiled(
        triton_adamw._adamw, signature, constants, capability, num_warps=triton_adamw.UPDATE_WARPS, **options
    )


def adamw_ptx(*arguments: Any, **options: Any) -> str:
    return adamw(*arguments, **options)["ptx"]


def operations(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"^\s+(?:@!?%\S+ )?([a-z][\w.:]+)", ptx, re.MULTILINE))


def inexact(ptx: str) -> Iterator[str]:
    """Floating-point instructions that may round otherwise than the oracle: fused, flushing or approximate."""
    for name in operations(ptx):
        floating = re.search(r"\.f(16|32|64)(x2)?\b", name) is not None
        unrounded = re.match(r"(add|sub|mul|div|sqrt|fma|mad)\.(?!rn\.)", name) is not None
        fused = re.match(r"(fma|mad)\.", name) is not None
        if floating and (fused or unrounded or re.search(r"\.(ftz|approx|full|sat)\b", name)):
            yield name


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_equals_the_oracle_in_the_interpreter(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("in_interpreter.py"))],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@FORMATS
@FEW_DTYPES
def test_compiled_code_rounds_as_the_oracle_does(weight_format: WeightFormat, grad_dtype: GradDtype) -> None:
    ptx = adamw_ptx(weight_format, grad_dtype, **triton_kernels.EXACT)
    assert list(inexact(ptx)) == []
    for name in ("sqrt.rn.f32", "div.rn.f32", "mul.rn.f32", "add.rn.f32"):
        assert operations(ptx)[name] > 0


@pytest.mark.parametrize("arithmetic", [Arithmetic.DEEPSPEED, Arithmetic.DEEPSPEED_TAIL])
@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (75, 120))])
def test_compiled_code_fuses_where_deepspeed_does_and_nowhere_else(arithmetic: Arithmetic, capability: int) -> None:
    ptx = adamw_ptx(WeightFormat.F32, GradDtype.F32, True, capability, arithmetic, **triton_kernels.EXACT)
    assert set(inexact(ptx)) <= {"fma.rn.f32", "fma.rn.f32x2"}
    found = operations(ptx)
    # Six sums of a product for each of a thread's four elements, in a whole block and in one that ends early.
    assert found["fma.rn.f32"] + 2 * found["fma.rn.f32x2"] == 2 * 4 * 6
    assert not any(re.match(r"(add|sub)\..*f32", name) for name in found)


@pytest.mark.parametrize("capability", [80, *(pytest.param(c, marks=pytest.mark.slow) for c in (75, 86, 89, 100, 120))])
def test_compiled_code_of_other_gpus(capability: int) -> None:
    ptx = adamw_ptx(WeightFormat.F16_MASTER, GradDtype.F16, capability=capability, **triton_kernels.EXACT)
    assert list(inexact(ptx)) == []
    assert operations(ptx)["cvt.rn.f16.f32"] or operations(ptx)["cvt.rn.f16x2.f32"]


def test_without_the_options_it_would_be_seen() -> None:
    found = list(inexact(adamw_ptx(WeightFormat.F32, GradDtype.F32, enable_fp_fusion=True)))
    assert any(name.startswith("fma") or name in {"mul.f32", "add.f32"} for name in found)


@FORMATS
def test_aligned_arrays_are_read_and_written_in_one_piece_by_each_thread(weight_format: WeightFormat) -> None:
    """Four elements: 16 bytes of arrays of 32 bits (moments, master weights), 8 of those of 16 bits."""
    wide = operations(adamw_ptx(weight_format, GradDtype.BF16, **triton_kernels.EXACT))
    narrow = operations(adamw_ptx(weight_format, GradDtype.BF16, aligned=False, **triton_kernels.EXACT))
    of_32_bits = 2 if weight_format is WeightFormat.BF16_REMAINDER else 3
    read_of_16, written_of_16 = {WeightFormat.BF16_REMAINDER: (3, 2), WeightFormat.F32: (1, 0)}.get(
        weight_format, (1, 1)
    )
    assert (wide["ld.global.v4.b32"], wide["ld.global.v2.b32"]) == (of_32_bits, read_of_16)
    assert (wide["st.global.v4.b32"], wide["st.global.v2.b32"]) == (of_32_bits, written_of_16)
    assert narrow["ld.global.v4.b32"] == narrow["ld.global.v2.b32"] == 0


def test_offsets_have_64_bits() -> None:
    """Program × block overflows 32 bits at 2³¹ elements; no machine of ours can run that many to see it."""
    ttir = adamw(WeightFormat.F32, GradDtype.F32, **triton_kernels.EXACT)["ttir"]
    assert re.findall(r"arith\.muli .* : (\w+)", ttir) == ["i64"]
    assert set(re.findall(r"tt\.addptr .* tensor<1024x(i\d+)>", ttir)) == {"i64"}


@DTYPES
def test_compiled_sums(grad_dtype: GradDtype) -> None:
    signature = {"table": "*i64", "num_blocks": "i64", "begin": "i64", "end": "i64", "sums": "*fp64", "bad": "*i32"}
    constants = {"GRAD": int(grad_dtype), "BLOCKS": 2, "ROWS": 16}
    ptx = compiled(triton_kernels._block_sums, signature, constants, num_warps=1, **triton_kernels.EXACT)["ptx"]
    assert list(inexact(ptx)) == []
    assert operations(ptx)["add.rn.f64"] >= 16


def test_compiled_trees() -> None:
    signature = {"table": "*i64", "first": "i64", "num_refs": "i64", "sums": "*fp64", "bad": "*i32"}
    signature |= {"out_sums": "*fp64", "out_bad": "*i64"}
    constants = {"LEAVES": 1024, "LEVELS": 10}
    ptx = compiled(triton_kernels._trees, signature, constants, num_warps=4, **triton_kernels.EXACT)["ptx"]
    assert list(inexact(ptx)) == []


def test_a_compiler_that_flushes_denormals_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    spec = importlib.util.spec_from_file_location("again", str(triton_kernels.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"3\.5\.1 flushes denormals"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
