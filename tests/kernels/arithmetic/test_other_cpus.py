"""The plain path on a CPU that is not this one: cross-compiled for aarch64, run by an emulator, equal to the oracle."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.arithmetic.states import State, assert_same, by_oracle, of, ordinary, special
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw.scalars import Arithmetic, scalars
from tidegate.kernels.arithmetic import oracle

ROOT = Path(__file__).parents[3]
NAMES = ("adamw", "block_checksums", "checksum", "computing_cores", "stream", "sum_of_squares", "thread_pool")
SOURCES = [ROOT / "kernels" / "src" / f"{name}.cpp" for name in NAMES]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
FORMATS = pytest.mark.parametrize("weight_format", list(WeightFormat))
DTYPES = pytest.mark.parametrize("grad_dtype", list(GradDtype))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER}")
    program = tmp_path_factory.mktemp("aarch64") / "driver"
    sources = [*SOURCES, Path(__file__).with_name("driver.cpp")]
    command = [COMPILER, *FLAGS, "-Werror", "-static", "-pthread", f"-I{SOURCES[0].parent}", *sources, "-o", program]
    subprocess.run(command, check=True)
    return program


def test_the_flags_are_those_of_the_build() -> None:
    build = (ROOT / "CMakeLists.txt").read_text()
    assert all(flag in build for flag in FLAGS if flag != "-std=c++17")


@pytest.mark.slow
@FORMATS
@DTYPES
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_aarch64_equals_the_oracle(
    driver: Path, weight_format: WeightFormat, grad_dtype: GradDtype, decoupled: bool, arithmetic: Arithmetic
) -> None:
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"no {EMULATOR}")
    values = of(arithmetic, scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, 2, decoupled, grad_scale=0.7))
    for state in (special(weight_format, grad_dtype), ordinary(65_541, weight_format, grad_dtype)):
        head = struct.pack("<4q10fi", len(state.weight), weight_format, grad_dtype, 2, *values.as_tuple(), arithmetic)
        sent = b"".join([head, *(a.tobytes() for a in state.arrays() if a is not None)])
        done = subprocess.run([EMULATOR, driver], input=sent, stdout=subprocess.PIPE, check=True)
        updated, norm = received(done.stdout, state)
        by_oracle(state, weight_format, grad_dtype, values)
        assert_same(updated, state)
        assert norm == oracle.sum_of_squares(state.grad, grad_dtype)


def received(output: bytes, like: State) -> tuple[State, tuple[float, int]]:
    """The arrays that the driver wrote, and its norm."""
    arrays, place = [], 0
    for array in list(like.arrays())[:-1]:
        if array is not None:
            arrays.append(np.frombuffer(output, array.dtype, len(array), place))
            place += array.nbytes
        else:
            arrays.append(None)
    return State(*arrays, like.grad), struct.unpack_from("<dq", output, place)
