"""Reports everything that bench/gpu.sh needs and this machine lacks, in one message, before a stage runs.

    python -m bench.gpu.preflight [--dry] [--wheels FOLDER]

Packages in the folder of wheels count as present, because they will be installed. This module itself needs only
Python's standard library, until it has found the other packages.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from bench.gpu.needs import ABSENT, needs, package
from tidegate.triton_needs import missing_for_triton, python_headers

WHEELHOUSE = "python3 -m bench.gpu.wheelhouse wheels"


def missing(dry: bool, wheels: Path | None) -> list[str]:
    """One line for each missing thing, with a remedy."""
    found = [*_wheels(wheels), *_packages(wheels)]
    if not _built():
        found += _build_tools()
    if not dry:
        found += [*_cuda(), *missing_for_triton()]
    return list(dict.fromkeys(found))


def _named(wheels: Path | None) -> dict[str, str]:
    """File names of the wheels in the folder, by package."""
    return {} if wheels is None else {package(path.name): path.name for path in sorted(wheels.glob("*.whl"))}


def _wheels(wheels: Path | None) -> list[str]:
    """Message about wheels that this Python cannot install; empty if there are none."""
    if wheels is None:
        return []
    files = _named(wheels).values()
    if not files:
        return [f"WHEELS={wheels} holds no wheels: on a machine with a network, {WHEELHOUSE}"]
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    others = [name for name in files if re.search(r"-cp\d+-cp\d+", name) and f"-{here}-" not in name]
    if not others:
        return []
    return [
        f"wheels for another Python than this one, {here}: {', '.join(others)}. Make them with the same version: "
        f"PYTHON -m bench.gpu.wheelhouse"
    ]


def _packages(wheels: Path | None) -> list[str]:
    """Messages about missing packages that every stage needs, or that are needed to build the extension, if it is not
    built."""
    there, built = _named(wheels), _built()
    kinds = ("run",) if built else ("run", "build")
    lines = []
    for need in needs():
        if need.kind not in kinds or need.name in there:
            continue
        problem = need.problem()
        if problem and not (need.name in ("cmake", "ninja") and shutil.which(need.name)):
            lines.append(f"{problem}; docs/gpu.md says which build" if need.name == "torch" else problem)
    if (wheels is not None or not built) and importlib.util.find_spec("pip") is None:
        lines.append("pip: not installed (Debian: apt-get install python3-pip)")
    return lines


def _built() -> bool:
    """Whether Tidegate's C++ extension is built. Also True if its import fails only because another package is
    missing; that package is reported separately."""
    try:
        importlib.import_module("tidegate.kernels._native")
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("tidegate")
    except ImportError:
        return False
    return True


def _build_tools() -> list[str]:
    """Messages about missing tools for the build of the C++ extension."""
    named = os.environ.get("CXX", "")
    lines = []
    if not any(shutil.which(name) for name in (named.split()[:1] or ["c++", "g++", "clang++"])):
        lines.append("there is no C++ compiler (Debian: apt-get install g++)")
    headers = python_headers()
    return [*lines, headers] if headers else lines


def _cuda() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        from tidegate.agent.devices.cuda_problem import cuda_problem

        problem = cuda_problem()
    except (ImportError, OSError) as error:  # torch's own libraries
        return [f"torch cannot be imported ({error}); docs/gpu.md says which build to install"]
    return [] if problem is None else [f"no GPU can be used: {problem}; --dry needs none"]


def absent_sides(dry: bool, wheels: Path | None) -> list[str]:
    """One message for each reason why a training that Tidegate is compared with cannot run. Only the rows (results)
    of that training are then not measured."""
    sides = [need for need in needs() if need.kind == "side"]
    found = [need.problem() for need in sides if need.name not in _named(wheels) and need.problem()]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not dry and not any(map(shutil.which, (f"{toolkit}/bin/nvcc", "nvcc"))):
        found.append(
            "there is no nvcc, with which DeepSpeed compiles its optimizer (name the CUDA toolkit in CUDA_HOME)"
        )
    return [f"{problem}; rows of it will not be measured" for problem in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="for the emulated device: no GPU, no Triton")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that will be installed")
    args = parser.parse_args()
    lines = missing(args.dry, args.wheels)
    if lines:
        what = "1 thing is" if len(lines) == 1 else f"{len(lines)} things are"
        print(f"bench/gpu.sh: {what} missing:", *(f"  - {line}" for line in lines), sep="\n", file=sys.stderr)
        if any(line.endswith(ABSENT) for line in lines):
            print(f"Packages can be installed from wheels, WHEELS=FOLDER: on a machine with a network, {WHEELHOUSE}",
                  file=sys.stderr)  # fmt: skip
        sys.exit(2)
    for line in absent_sides(args.dry, args.wheels):
        print(f"bench/gpu.sh: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
