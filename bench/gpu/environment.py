"""Makes a virtual environment that sees all packages of this Python; more packages can be installed into it.

    python -m bench.gpu.environment FOLDER

It is needed where packages must not be installed into this Python itself, because it belongs to the distribution (PEP
668) or to another user. The environment has no pip of its own; it uses the pip of this Python.
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
