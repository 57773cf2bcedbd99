"""Check that the native module was built from the C++ sources next to it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tidegate.kernels import _native


def checksum_of_sources(folder: Path) -> str:
    """One checksum for all C++ sources in `folder`, computed as in CMakeLists.txt. The SHA-256 of each file, in
    hexadecimal, are joined in the order of the file names; the result is the SHA-256 of this text."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))
    sums = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256(sums.encode()).hexdigest()


def require_current_build(folder: Path = Path(__file__).parent / "src") -> None:
    """Raises ImportError if the native module was not built from the present sources. Wheels are not checked, because
    they have no sources."""
    built_from = getattr(_native, "SOURCES", "unknown")
    if folder.is_dir() and checksum_of_sources(folder) != built_from:
        raise ImportError(
            f"{_native.__file__} was not built from the sources in {folder}, and may compute wrong weights. "
            "Build it again: pip install -e ."
        )
