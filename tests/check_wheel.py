"""Checks that an installed wheel works without torch and NumPy: run `python -P tests/check_wheel.py` with it.

Each wheel of a release is tried with this in the container that built it, so it needs nothing but the wheel.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import files

import tidegate

DIGITS = b"123456789"
CRC32C = 0xE3069283
"""The checksum of DIGITS: the check value of CRC-32C."""


def main() -> None:
    """Loads the extension by its file, because the package around it needs NumPy, and computes a checksum."""
    file = next(file.locate() for file in files("tidegate") or () if file.name.startswith("_native."))
    loader = ExtensionFileLoader("_native", str(file))
    spec = importlib.util.spec_from_loader("_native", loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    assert not {"torch", "numpy"} & set(sys.modules)
    digits = ctypes.create_string_buffer(DIGITS)
    assert native.crc32c(ctypes.addressof(digits), len(DIGITS), 0) == CRC32C
    assert "baseline" in native.instruction_sets()
    print(f"tidegate {tidegate.__version__} works on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
