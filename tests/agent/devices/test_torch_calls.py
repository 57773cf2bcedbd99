"""Every call of torch.cuda in the product and in bench/gpu fits the signatures of torch from the oldest version on."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agent.devices.torch_calls import (
    RUNTIME,
    Use,
    fits,
    product_files,
    read_table,
    signature_in,
    signature_of,
    uses,
)

VERSIONS = {"2.6", "2.9", "2.13"}
"""The oldest that pyproject.toml allows, one between, and the newest."""
ROWS = "python -m tests.agent.devices.torch_calls FOLDER... adds a row from torch's sources"


@cache
def every_use() -> tuple[Use, ...]:
    return tuple(use for path in product_files() for use in uses(path))


def written(folder: Path, text: str) -> list[Use]:
    """The uses in a file of this text, which is read as agent/devices/cuda_torch.py is."""
    path = folder / "cuda_torch.py"
    path.write_text(text)
    return list(uses(path))


def test_each_has_a_row_that_it_fits_in_every_version() -> None:
    table = read_table()
    for use in every_use():
        assert use.name in table, f"{use.place}: {use.name} has no row in torch_signatures.json: {ROWS}"
        rows = table[use.name]
        assert set(rows) == ({"C++"} if use.name.startswith(RUNTIME + ".") else VERSIONS)
        for version, row in rows.items():
            assert row or use.arguments is None, f"{use.place}: {use.name} is no function in torch {version}"
            assert fits(use, signature_of(row or "()")), f"{use.place}: {use} does not fit torch {version}: {row}"


def test_each_fits_the_installed_torch() -> None:
    unknown = set()
    for use in every_use():
        if use.arguments is None or use.name.startswith(RUNTIME + "."):
            continue
        signature = installed(use.name)
        if signature is None:
            unknown.add(use.name)
        else:
            assert fits(use, signature), f"{use.place}: {use} does not fit torch {torch.__version__}: {signature}"
    assert unknown <= {"torch.Tensor.record_stream"}, "of C++, which tells no signature: the table has it"


def installed(name: str) -> inspect.Signature | None:
    """The signature in the torch that is installed, without self; None where it cannot be read."""
    owner: Any = torch
    *path, last = name.removeprefix("torch.").split(".")
    for part in path:
        owner = getattr(owner, part)
    try:
        signature = inspect.signature(getattr(owner, last))
    except ValueError:
        return None
    skip = 1 if inspect.isclass(owner) else 0
    return signature.replace(parameters=list(signature.parameters.values())[skip:])


def test_the_table_says_what_the_installed_torch_says() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in VERSIONS:
        pytest.skip(f"the table has no torch {version}")
    folder = Path(torch.__file__).parents[1]
    for name, rows in read_table().items():
        if not name.startswith(RUNTIME + "."):
            assert rows[version] == signature_in(folder, name), name


def test_the_newest_and_the_oldest_are_those_that_are_allowed() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'agent = ["torch>=2.6,<2.14"' in text


def test_the_calls_that_matter_are_seen() -> None:
    names = {use.name for use in every_use()}
    assert {
        "torch.cuda.Stream", "torch.cuda.Event", "torch.cuda.stream", "torch.cuda.mem_get_info",
        "cudart.cudaHostRegister", "cudart.cudaHostUnregister", "torch.Tensor.record_stream",
        "torch.cuda.Stream.wait_event", "torch.cuda.Event.record", "torch.cuda.Event.elapsed_time",
        "torch.cuda.set_per_process_memory_fraction",
    } <= names  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.Stream(device, priorty=-1)",
        "torch.cuda.Event(True, True, True, True, True)",
        "torch.cuda.cudart().cudaHostRegister(address, nbytes)",
        "torch.cuda.cudart().cudaHostRegister(ptr=1, size=2, flags=3)",
        "stream.wait_event()",
        "tensor.record_stream(stream, device)",
        "torch.cuda.OutOfMemoryError('x', nonsense=1)",
    ],
)
def test_a_wrong_call_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("tests.agent.devices.torch_calls.ROOT", tmp_path)
    use, *_ = (one for one in written(tmp_path, call) if one.arguments is not None and one.name != "torch.cuda.cudart")
    rows = read_table()[use.name]
    assert not any(row and fits(use, signature_of(row)) for row in rows.values())


def test_a_new_call_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.agent.devices.torch_calls.ROOT", tmp_path)
    (use,) = written(tmp_path, "torch.cuda.newest_thing(1)")
    assert use.name not in read_table()


def test_arguments_that_cannot_be_counted_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.agent.devices.torch_calls.ROOT", tmp_path)
    with pytest.raises(ValueError, match="write them out"):
        written(tmp_path, "torch.cuda.Stream(*places)")
