"""What ptxas makes of every form of the Triton kernels: no spills, and one signature whatever the sizes are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import triton_registers
from bench.triton_registers import ADDRESS, CAPABILITIES, Bound, bound, forms, rows, sum_of, update_of
from tidegate.kernels import GradDtype, WeightFormat
from tidegate.kernels.adamw import triton_adamw
from tidegate.kernels.adamw.scalars import Arithmetic

FORMS = dict(forms())
USUAL = ("BF16_REMAINDER BF16 TORCH AdamW aligned", "F32 F32 DEEPSPEED AdamW unaligned", "sum of BF16")
SIZES = (1, 2, 15, 16, 17, 32, 1024, 2**31 - 1, 2**31, 2**32, 2**40)
"""Triton makes code of its own for 1, for multiples of 16, and for what 32 bits do not hold."""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def update(weight: WeightFormat, numel: int, address: int) -> None:
    run = update_of(numel, weight, GradDtype.F32, Arithmetic.TORCH, "AdamW", address)
    triton_adamw.update([run])


@pytest.mark.parametrize("weight", list(WeightFormat))
def test_an_update_has_one_signature_whatever_its_size_and_place(weight: WeightFormat) -> None:
    found: set[Bound] = set()
    for numel in SIZES:
        for address in (16, ADDRESS, ADDRESS + 4096):
            found.update(bound(functools.partial(update, weight, numel, address)))
    assert len(found) == 1


def test_sums_have_one_signature_whatever_their_sizes() -> None:
    calls: list[Callable[[], None]] = [
        functools.partial(sum_of, GradDtype.BF16, n) for n in (1, 65536, 2**20, 2**21 + 1)
    ]
    found = {one for call in calls for one in bound(call)}
    assert {one.kernel.rpartition(".")[2] for one in found} == {"_block_sums", "_trees"}
    assert len(found) == 2


def test_integers_have_64_bits_and_nothing_is_known_of_them() -> None:
    for call in (FORMS[USUAL[0]], FORMS["sum of F32"]):
        for one in bound(call):
            integers = {kind for _, kind in one.signature if kind[0] in "iu"}
            assert integers == {"i64"}
            assert "tt.divisibility" not in one.attributes


def test_every_form_binds_constants_of_its_own() -> None:
    updates = [bound(call)[0] for form, call in FORMS.items() if not form.startswith("sum")]
    assert len(set(updates)) == len(updates) == 4 * 3 * (2 + 3 + 3) * 2


@pytest.mark.parametrize("form", USUAL)
def test_nothing_spills(form: str) -> None:
    check(form, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("which", [*WeightFormat.__members__, "sum"])
def test_nothing_spills_in_any_form(which: str, capability: int) -> None:
    for form in FORMS:
        if form.startswith(which + " "):
            check(form, capability)


def check(form: str, capability: int) -> None:
    found = rows(FORMS[form], form, capability)
    assert len(found) == (2 if form.startswith("sum") else 1)
    for row in found:
        assert (row.spilled_bytes, row.stack_bytes) == (0, 0), row


def test_a_spill_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(triton_adamw.EXACT, "maxnreg", 24)
    (row,) = rows(FORMS[USUAL[0]], USUAL[0], 90)
    assert row.spilled_bytes > 0
    monkeypatch.setattr(triton_registers, "forms", lambda: [(USUAL[0], FORMS[USUAL[0]])])
    monkeypatch.setattr("sys.argv", ["triton_registers.py", "--capabilities", "90", "--json"])
    assert triton_registers.main() == 1
