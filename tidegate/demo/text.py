"""The demo's text: bytes of real files, cut into random windows."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from tidegate.errors import DataError

MAX_BYTES = 8_000_000
ENDINGS = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".js", ".java", ".rs", ".go", ".tex", ".html")


def read_text(folder: Path | None, window: int) -> torch.Tensor:
    """All text files below `folder` (the standard library's sources by default), at most MAX_BYTES, as bytes.

    DataError when the folder cannot be read or holds less than a few windows of text.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"--text {root} is not a folder that can be read. Name a folder with text files.")
    taken = bytearray()
    files = sorted(p for p in root.rglob("*") if p.suffix in ENDINGS and "site-packages" not in p.parts)
    for path in files:
        if len(taken) >= MAX_BYTES:
            break
        taken += _content(path)
    if len(taken) < 100 * window:
        raise DataError(
            f"{root} has {len(taken):,} bytes of readable text in {len(files)} files ({', '.join(ENDINGS)}); "
            f"at least {100 * window:,} are needed."
        )
    return torch.frombuffer(taken[:MAX_BYTES], dtype=torch.uint8)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    # Files with NUL bytes are not text, whatever their name says.
    return b"" if b"\0" in content[:4096] else content


def batch(text: torch.Tensor, size: int, window: int, generator: torch.Generator) -> torch.Tensor:
    """`size` random windows: (size, window) of byte values as int64."""
    starts = torch.randint(0, len(text) - window, (size,), generator=generator)
    return torch.stack([text[start : start + window] for start in starts.tolist()]).long()
