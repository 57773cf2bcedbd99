"""Checks of what Triton needs on a machine before its first kernel can run. Uses only Python's standard library."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

OLDEST: Final = (3, 6)
"""Oldest supported version of Triton: compilers of older versions flush denormals."""
LDCONFIG: Final = Path("/sbin/ldconfig")
"""The program with which Triton looks up the driver's library."""


def missing_for_triton() -> list[str]:
    """One sentence with the remedy for each missing requirement; empty if nothing is missing."""
    checks = (_version, _compiler, python_headers, _ldconfig, _cache)
    return [sentence for sentence in (check() for check in checks) if sentence]


def _version() -> str:
    oldest = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"Triton is not installed: torch for CUDA brings it; {oldest} or newer is needed (pip install triton)."
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is older than {oldest}: torch 2.10 or newer brings one that is not."
    return ""


def _compiler() -> str:
    named = os.environ.get("CC")
    if named is not None:
        found = shutil.which(named.split()[0]) if named.split() else None
        return "" if found else f"CC={named!r} is not a compiler that can be run: Triton takes it for gcc."
    if shutil.which("gcc") or shutil.which("clang"):
        return ""
    return "There is no C compiler: Triton needs gcc or clang (Debian: apt-get install gcc libc6-dev), or CC."


def python_headers() -> str:
    """A sentence with the remedy if Python.h is missing, else empty. The C++ extension needs Python.h, too."""
    scheme = sysconfig.get_default_scheme()
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if Path(include, "Python.h").is_file():
        return ""
    return f"{include}/Python.h is missing: install Python's headers (Debian: apt-get install python3-dev)."


def _ldconfig() -> str:
    if os.environ.get("TRITON_LIBCUDA_PATH") or os.access(LDCONFIG, os.X_OK):
        return ""
    return f"{LDCONFIG} is missing, which Triton asks for libcuda.so.1: name its folder in TRITON_LIBCUDA_PATH."


def _cache() -> str:
    """A sentence with the remedy if Triton cannot use its cache: it writes compiled kernels there and loads them."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    remedy = "set TRITON_CACHE_DIR to a folder that can be written and whose files may be executed."
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
        if os.statvfs(cache).f_flag & os.ST_NOEXEC:
            return f"Triton's cache {cache} is on a file system mounted noexec: {remedy}"
    except OSError as error:
        return f"Triton's cache {cache} cannot be written ({error.strerror}): {remedy}"
    return ""
