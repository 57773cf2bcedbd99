"""Whether the native module was built from the sources that lie beside it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tidegate.kernels import _native


def sum_of_sources(folder: Path) -> str:
    """As CMakeLists.txt computes it: the SHA-256 of the SHA-256 of each file, in the order of their names."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    sums = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(sums.encode()).hexdigest()


def require_current(folder: Path = Path(__file__).parent / "src") -> None:
    """ImportError when the module is older than its sources. A wheel brings no sources, and nothing is checked."""
    built_from = getattr(_native, "SOURCES", "unknown")
    if folder.is_dir() and sum_of_sources(folder) != built_from:
        raise ImportError(
            f"{_native.__file__} was not built from the sources in {folder}, and may compute wrong weights. "
            "Build it anew: pip install -e ."
        )
