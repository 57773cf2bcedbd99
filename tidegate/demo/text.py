"""Training text of the demo: bytes of text files, cut into random windows."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from tidegate.errors import DataError

MAX_BYTES = 8_000_000
ENDINGS = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".js", ".java", ".rs", ".go", ".tex", ".html")


def read_text(folder: Path | None, window: int) -> torch.Tensor:
    """The bytes of all text files below `folder` (default: sources of the standard library), at most MAX_BYTES, as
    uint8.

    DataError when the folder cannot be read, or has fewer bytes of text than 100 windows.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"--text {root} is not a folder that can be read. Name a folder with text files.")
    content = bytearray()
    files = sorted(p for p in root.rglob("*") if p.suffix in ENDINGS and "site-packages" not in p.parts)
    for path in files:
        if len(content) >= MAX_BYTES:
            break
        content += _content(path)
    if len(content) < 100 * window:
        raise DataError(
            f"{root} has {len(content):,} bytes of readable text in {len(files)} files ({', '.join(ENDINGS)}); "
            f"at least {100 * window:,} are needed. Name a folder with more text."
        )
    return torch.frombuffer(content[:MAX_BYTES], dtype=torch.uint8)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    # A file with NUL bytes is not text, whatever its name.
    return b"" if b"\0" in content[:4096] else content


def batch(text: torch.Tensor, size: int, window: int, generator: torch.Generator) -> torch.Tensor:
    """A batch of `size` random windows: byte values as int64, shape (size, window)."""
    starts = torch.randint(0, len(text) - window, (size,), generator=generator)
    return torch.stack([text[start : start + window] for start in starts.tolist()]).long()
