"""Makes an environment that sees all packages of this Python, and into which more can be installed beside them.

    python -m bench.gpu.environment FOLDER

A distribution's Python refuses to be installed into (PEP 668), and one that belongs to somebody should stay as it is.
pip itself is the one of this Python.
"""

from __future__ import annotations

import site
import sys
import venv
from pathlib import Path


def make(folder: Path) -> None:
    venv.EnvBuilder(system_site_packages=True, with_pip=False, symlinks=True).create(folder)
    if sys.prefix == sys.base_prefix:
        return
    # This Python is an environment itself: the new one would see what lies below it, and not its packages.
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    lines = [f"import site; site.addsitedir({packages!r})\n" for packages in site.getsitepackages()]
    (folder / "lib" / version / "site-packages" / "below.pth").write_text("".join(lines))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
