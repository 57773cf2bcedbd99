"""Counts the statements of the product code: nodes of the syntax tree that are statements, without docstrings.

python bench/statements.py [DIRECTORY]     DIRECTORY: a checkout; default: the present one
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Final

PARTS: Final = ("tidegate", "agent", "daemon", "dashboard", "grafana", "kernels")
"""Folders of the product code; `bench/` and `tests/` are not part of it."""


def statements(source: str) -> int:
    """The number of statements in a module. Docstrings and other texts that stand alone do not count."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(not _is_text(node) for node in found)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def count(root: Path) -> dict[str, int]:
    """Statements of each part in a checkout. `tidegate/` has symbolic links to the other parts, which count once."""
    by_part = {}
    for part in PARTS:
        files = [file for file in (root / part).rglob("*.py") if not _is_linked(file, root / part)]
        by_part[part] = sum(statements(file.read_text()) for file in files)
    return by_part


def _is_linked(file: Path, folder: Path) -> bool:
    return any(parent.is_symlink() for parent in file.parents if folder in parent.parents)


def main() -> None:
    by_part = count(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]))
    print(json.dumps({"statements": sum(by_part.values()), **by_part}))


if __name__ == "__main__":
    main()
