"""Which calls of torch.cuda the product and bench/gpu make, and what their signatures are in torch's sources.

`python -m tests.agent.devices.torch_calls FOLDER...` writes torch_signatures.json again. Each folder holds a `torch`
package or what of it is Python: `torch/cuda/*.py`, `torch/_C/__init__.pyi` and `torch/version.py` of a wheel.
Nothing is imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("torch_signatures.json")
RUNTIME = "cudart"
"""What stands for `torch.cuda.cudart()`: the bindings are C++, which a build for the CPU lacks."""
METHODS = {
    "record_stream": "torch.Tensor.record_stream",
    "wait_event": "torch.cuda.Stream.wait_event",
    "wait_stream": "torch.cuda.Stream.wait_stream",
    "elapsed_time": "torch.cuda.Event.elapsed_time",
    "query": "torch.cuda.Event.query",
    "record": "torch.cuda.Event.record",
    "synchronize": "torch.cuda.Event.synchronize",
}
"""Methods of streams, events and tensors, by which agent/devices/cuda_torch.py calls them."""


@dataclass(frozen=True)
class Use:
    """One place where the product names something of torch.cuda. `arguments` is None where it is not called."""

    name: str
    place: str
    arguments: tuple[int, tuple[str, ...]] | None


def product_files() -> list[Path]:
    """Those that name CUDA at all: to parse every file takes seconds."""
    folders = [
        ROOT / "agent",
        ROOT / "kernels",
        ROOT / "bench" / "gpu",
        *(p for p in (ROOT / "tidegate").iterdir() if not p.is_symlink()),
    ]
    found = {path for folder in folders for path in (folder.rglob("*.py") if folder.is_dir() else [folder])}
    return sorted(path for path in found if path.suffix == ".py" and "cuda" in path.read_text())


def uses(path: Path) -> Iterator[Use]:
    """ValueError for a call whose arguments cannot be counted."""
    tree = ast.parse(path.read_text())
    methods = METHODS if path.name == "cuda_torch.py" else {}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    # Of a chain, only its longest form counts: the value of an attribute is part of one.
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = _dotted(node)
        if name is not None and (id(node) in inner or not name.startswith(("torch.cuda.", RUNTIME + "."))):
            continue
        call = called.get(id(node))
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        name = name or (methods.get(node.attr) if call is not None and not is_own else None)
        if name is not None:
            yield Use(name, f"{path.relative_to(ROOT)}:{node.lineno}", None if call is None else _arguments(call))


def _dotted(node: ast.expr) -> str | None:
    """The name of a chain of attributes that begins with `torch`, or with `torch.cuda.cudart()`; None for others."""
    if isinstance(node, ast.Name):
        return node.id if node.id == "torch" else None
    if isinstance(node, ast.Call):
        return RUNTIME if _dotted(node.func) == "torch.cuda.cudart" else None
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None


def _arguments(call: ast.Call) -> tuple[int, tuple[str, ...]]:
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        raise ValueError(f"line {call.lineno}: arguments with * cannot be held against a signature: write them out")
    return len(call.args), tuple(str(one.arg) for one in call.keywords)


def fits(use: Use, signature: inspect.Signature) -> bool:
    """Whether the call is one that is meant: a keyword that only `**kwargs` would swallow is none."""
    if use.arguments is None:
        return True
    count, keywords = use.arguments
    named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    signature = signature.replace(parameters=named)
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def signature_of(row: str) -> inspect.Signature:
    """From a row of the table: `(device=..., priority=...)`."""
    scope: dict[str, object] = {}
    exec(f"def found{row}: ...", scope)
    return inspect.signature(scope["found"])  # type: ignore[arg-type]


def read_table() -> dict[str, dict[str, str]]:
    """Signatures by name and version. An empty one: there is such a name, and it is not called."""
    table: dict[str, dict[str, str]] = json.loads(TABLE.read_text())["signatures"]
    return table


# ---- from torch's sources


def version_of(folder: Path) -> str:
    """Major and minor."""
    text = (folder / "torch" / "version.py").read_text()
    version = next(line for line in text.splitlines() if line.startswith("__version__"))
    return ".".join(version.partition("'")[2].split(".")[:2])


def signature_in(folder: Path, name: str) -> str:
    """The row of `name` from these sources; LookupError where they do not have it."""
    sources = [folder / "torch" / "cuda" / f"{one}.py" for one in ("__init__", "memory", "streams")]
    owner, _, method = name.rpartition(".")
    if owner == "torch.Tensor":
        return _of_class(_definition([folder / "torch" / "_C" / "__init__.pyi"], "TensorBase"), method)
    if owner.startswith("torch.cuda."):
        return _of_class(_definition(sources, owner.removeprefix("torch.cuda.")), method)
    found = _definition(sources, method)
    if isinstance(found, ast.Assign):
        return ""
    if isinstance(found, ast.ClassDef):
        makers = [one.name for one in found.body if isinstance(one, ast.FunctionDef)]
        return _of_class(found, "__new__" if "__new__" in makers else "__init__")
    return _row(found.args, skip=0)


def _definition(sources: list[Path], name: str) -> ast.FunctionDef | ast.ClassDef | ast.Assign:
    for source in sources:
        for node in _parsed(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return node
    raise LookupError(f"{name} is not in {', '.join(map(str, sources))}")


@functools.cache
def _parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def _of_class(found: ast.FunctionDef | ast.ClassDef | ast.Assign, method: str) -> str:
    assert isinstance(found, ast.ClassDef)
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return _row(node.args, skip=1)
    raise LookupError(f"{found.name} has no {method}")


def _row(arguments: ast.arguments, skip: int) -> str:
    """Without types, and with `...` for every default; `skip` leaves self out."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    words = [one.arg + ("=..." if i >= required else "") for i, one in enumerate(positional)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    words = words[skip:]
    if arguments.vararg is not None:
        words.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        words.append("*")
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        words.append(one.arg + ("=..." if default is not None else ""))
    if arguments.kwarg is not None:
        words.append("**" + arguments.kwarg.arg)
    return f"({', '.join(words)})"


def main() -> None:
    table = json.loads(TABLE.read_text())
    names = {use.name for path in product_files() for use in uses(path)} | set(table["signatures"])
    for folder in map(Path, sys.argv[1:]):
        for name in sorted(names):
            if not name.startswith(RUNTIME + "."):
                table["signatures"].setdefault(name, {})[version_of(folder)] = signature_in(folder, name)
    table["signatures"] = dict(sorted(table["signatures"].items()))
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
