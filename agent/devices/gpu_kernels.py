"""Chooses the kernels of a GPU: Triton's if each of them passed a test launch with correct bits, else torch operations.

Triton compiles a kernel at its first launch. This needs a C compiler, Python's headers, the driver's library and a
writable folder, and fails if one of them is missing. So the test launch is made at the start, where errors can be
handled, and not in a lane's thread.
"""

from __future__ import annotations

import errno
import functools
import importlib
import logging
import subprocess
import sysconfig
import textwrap
from pathlib import Path
from typing import Final, cast

import torch

from tidegate.kernels.arithmetic import self_test
from tidegate.kernels.arithmetic.device_calls import GpuKernels
from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.logs import event

log = logging.getLogger("tidegate.devices")

MAX_CAUSE_CHARACTERS: Final = 500
"""Maximum length of an error in the log: Triton's compilation errors quote whole kernels."""

INSTALL_TRITON: Final = "install triton 3.6 or newer: pip install 'triton>=3.6'"
INSTALL_COMPILER: Final = (
    "install a C compiler with the headers of libc and Python (Debian: apt-get install gcc libc6-dev python3-dev), "
    "or name one in the variable CC"
)
SHOW_LIBCUDA: Final = (
    "name the folder of the driver's libcuda.so.1 in the variable TRITON_LIBCUDA_PATH, or run ldconfig as root"
)
MOVE_CACHE: Final = (
    "name a folder in the variable TRITON_CACHE_DIR that can be written, has room, and is not mounted noexec"
)
UPDATE_TRITON: Final = "install the newest triton that this torch allows"


@functools.cache
def load_kernels(device: torch.device, rule: Implementation) -> GpuKernels:
    """Returns the kernels of an update rule for `device`, tested once in this process. If the rule has a Triton kernel
    that cannot be used, a warning gives the reason.

    Triton's results equal the oracle's bit for bit. The results of torch's kernels do not, and these kernels are
    slower. An error of torch's kernels is raised, because then the device itself does not work.
    """
    in_torch = rule.in_torch(device.type)
    if rule.triton is None:
        return in_torch
    try:
        kernels = cast(GpuKernels, importlib.import_module(rule.triton.module))
        if differs := self_test.differences(kernels, device, rule.triton):
            raise ArithmeticError(f"these results differ from the reference implementation: {', '.join(differs)}")
    except Exception as error:
        cause = cause_of(error)
        log.warning(
            "Updates on %s run as torch operations, several times slower and only within fp32 rounding of those on "
            "the CPU, because Triton's kernels cannot be used: %s. To use them, %s, and start again.",
            device,
            cause,
            remedy_for(error),
            extra=event("triton_unusable", device=str(device), reason=cause),
        )
    else:
        return kernels
    self_test.differences(in_torch, device, rule.triton)
    return in_torch


def cause_of(error: Exception) -> str:
    """The error on one line, shortened. For a failed compiler: its name, its exit status, and the path of Python.h if
    this header is missing."""
    if not _is_compiler(error):
        message = textwrap.shorten(str(error), MAX_CAUSE_CHARACTERS).rstrip(".")
        return f"{type(error).__name__}: {message}" if message else type(error).__name__
    assert isinstance(error, subprocess.CalledProcessError)
    message = f"{error.cmd[0]} failed with status {error.returncode}, its messages are on stderr"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return message if header.exists() else f"{message}; {header} is missing"


def remedy_for(error: Exception) -> str:
    """The remedy for the error, as a phrase for the log."""
    message = str(error)
    if "failed to map segment" in message or _is_about_a_folder(error):
        return MOVE_CACHE
    if "libcuda" in message or "ldconfig" in message:
        return SHOW_LIBCUDA
    if _is_compiler(error) or "compiler" in message or isinstance(error, FileNotFoundError):
        return INSTALL_COMPILER
    return INSTALL_TRITON if isinstance(error, ImportError) else UPDATE_TRITON


def _is_about_a_folder(error: Exception) -> bool:
    """Whether the error says that a folder cannot be written."""
    unwritable = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}
    return isinstance(error, OSError) and error.errno in unwritable


def _is_compiler(error: Exception) -> bool:
    """Whether the error says that a program which Triton ran, other than ldconfig, has failed."""
    return isinstance(error, subprocess.CalledProcessError) and "ldconfig" not in str(error.cmd)
