"""Manifests are held against a schema: a good load of equal state, or an error with a name."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tidegate
from tests.agent.checkpoints.saving import Run
from tests.examples import examples
from tidegate.agent.checkpoints.manifest import Manifest
from tidegate.errors import ManifestDamaged, StorageError

KEPT: dict[str, Any] = {}
"""One checkpoint, its values and its state, for all examples."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tidegate.Checkpoint]:
    directory = tmp_path_factory.mktemp("manifests")
    with Run(subgroup_numel=3000) as run:
        run.steps(0, 1)
        made = run.optimizer.save_checkpoint(directory, save_also=lambda at: (at / "mine").write_text("x"))
        KEPT.update(
            text=(made.directory / "rank0.json").read_bytes(), state=run.optimizer.state_dict(),
            weights=[param.detach().clone() for param in run.params],
        )  # fmt: skip
    with Run(subgroup_numel=5000) as run:
        KEPT["run"] = run
        yield made


def packed(values: Any) -> bytes:
    """With a checksum that is right: what is wrong was written so."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32": zlib.crc32(text.encode()), "checkpoint": values}).encode()


def values() -> Any:
    return json.loads(KEPT["text"])["checkpoint"]


def equal_state_or_named_error(checkpoint: tidegate.Checkpoint, manifest: bytes) -> str:
    """The name of the error, "" when it loaded."""
    (checkpoint.directory / "rank0.json").write_bytes(manifest)
    run = KEPT["run"]
    for param, weight in zip(run.params, KEPT["weights"], strict=True):
        param.data.copy_(weight)
    try:
        found = run.optimizer.load_checkpoint(checkpoint.directory.parent)
    except StorageError as error:
        return type(error).__name__
    torch.testing.assert_close(run.optimizer.state_dict()["state"], KEPT["state"]["state"], rtol=0, atol=0)
    assert (found.step, run.optimizer.num_steps) == (1, 1)
    return ""


def change(path: list[str | int], value: Any) -> Callable[[Any], None]:
    def changed(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return changed


def remove(path: list[str | int]) -> Callable[[Any], None]:
    def removed(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        del values[path[-1]]

    return removed


WRONG: dict[str, Callable[[Any], Any]] = {
    "a subgroup is missing at the end": remove(["subgroups", -1]),
    "a subgroup is missing at the beginning": remove(["subgroups", 0]),
    "no subgroups": change(["subgroups"], []),
    "a segment is missing": remove(["subgroups", 0, "segments", 0]),
    "a subgroup twice": lambda v: v["subgroups"].append(v["subgroups"][0]),
    "a segment too far": change(["subgroups", 1, "segments", 0, "offset"], 2999),
    "a segment that begins elsewhere": change(["subgroups", 1, "segments", 0, "start"], 1),
    "a segment of no parameter": change(["subgroups", 1, "segments", 0, "param"], 99),
    "a segment of the last parameter from behind": change(["subgroups", 1, "segments", 0, "param"], -1),
    "a huge number": change(["subgroups", 0, "numel"], 10**30),
    "a number as text": change(["subgroups", 0, "numel"], "3000"),
    "a fraction": change(["step"], 1.5),
    "no number": change(["step"], float("nan")),
    "a truth value": change(["step"], True),
    "nothing": change(["subgroups"], None),
    "text for a list": change(["params"], "abc"),
    "a list for an object": change(["subgroups", 0], [1, 2]),
    "an unknown name": change(["more"], 1),
    "a missing name": remove(["run_id"]),
    "a missing name of a subgroup": remove(["subgroups", 0, "file"]),
    "a file elsewhere": change(["subgroups", 0, "file"], "../../000000.tide"),
    "an absolute file": change(["subgroups", 0, "file"], "/etc/passwd"),
    "an attempt elsewhere": change(["attempt"], "x/../../.."),
    "a run id that is none": change(["run_id"], "zz"),
    "a format that is none": change(["subgroups", 0, "weight_format"], 77),
    "state of other size": change(["subgroups", 0, "state_bytes"], 9),
    "a rank beyond": change(["rank"], 1),
    "no ranks": change(["ranks"], 0),
    "a saved file elsewhere": change(["files", 0, "file"], "../mine"),
    "a saved file's checksum that is none": change(["files", 0, "sha256"], 3),
    "a version that is none": change(["version"], "2"),
    "a version of before the first": change(["version"], 0),
    "a lone surrogate": change(["rule"], "\ud800"),
    "another step": change(["step"], 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_schema_refuses(saved: tidegate.Checkpoint, name: str) -> None:
    changed = values()
    WRONG[name](changed)
    assert equal_state_or_named_error(saved, packed(changed)) == "ManifestDamaged"


SENTENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a gap": (
        change(["subgroups", 0, "segments", 0, "offset"], 2),
        "found a gap after 0 elements of parameter 0, expected each of its 3,000 elements exactly once.",
    ),
    "a repetition": (
        change(["subgroups", 2, "segments", 0, "offset"], 2000),
        "found a repetition after 2,423 elements of parameter 3, expected each of its 4,096 elements exactly once.",
    ),
    "the end": (
        change(["subgroups"], []),
        "found 0 elements of parameter 0, expected each of its 3,000 elements exactly once.",
    ),
    "no such parameter": (
        change(["subgroups", 0, "segments", 0, "param"], 99),
        "found a segment of parameter 99 (counted from 0), expected segments of the 4 listed parameters.",
    ),
    "a begin elsewhere": (
        change(["subgroups", 0, "segments", 0, "start"], 1000),
        "found a segment of subgroups[0] that begins at element 1,000, expected one that begins at element 0.",
    ),
    "an unknown name": (
        change(["more"], 1),
        "found an unknown name, 'more', at its top, expected only names that Tidegate writes.",
    ),
    "an unknown name further in": (
        change(["subgroups", 0, "more"], 1),
        "found an unknown name, 'more', in subgroups[0], expected only names that Tidegate writes.",
    ),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_wrong_is_said_in_a_sentence(saved: tidegate.Checkpoint, name: str) -> None:
    make_wrong, sentence = SENTENCES[name]
    changed = values()
    make_wrong(changed)
    with pytest.raises(ManifestDamaged) as error:
        Manifest.unpack(packed(changed), Path("f"))
    assert str(error.value) == f"f is a damaged manifest: {sentence} {ManifestDamaged.remedy}"


def test_what_is_no_json_or_too_deep_or_too_large(saved: tidegate.Checkpoint) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    for data in (
        b"", b"\xff\xfe\x00", b"null", b"[]", b"3", deep, b'{"checkpoint": %s, "crc32": 1}' % deep,
        b'{"crc32": 1, "checkpoint": {"version": ' + b"9" * 5000 + b"}}", b'{"crc32": NaN, "checkpoint": {}}',
        KEPT["text"][:-9], KEPT["text"] + b"x",
    ):  # fmt: skip
        with pytest.raises(ManifestDamaged):
            Manifest.unpack(data, Path("f"))
        assert equal_state_or_named_error(saved, data) == "ManifestDamaged"


def test_a_manifest_that_is_as_it_was_loads(saved: tidegate.Checkpoint) -> None:
    assert equal_state_or_named_error(saved, KEPT["text"]) == ""
    assert equal_state_or_named_error(saved, packed(values())) == ""


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-3, 5000), st.floats(), st.text(max_size=5),
        st.sampled_from([10**400, -1, 2**63, "../x", "", "rank0", "\x00"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(values: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of everything in it."""
    for key in values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield (*at, key)
        yield from places(values[key], (*at, key))


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_gives_equal_state_or_a_named_error(saved: tidegate.Checkpoint, data: st.DataObject) -> None:
    """Values replaced, removed, doubled or swapped, below a checksum that is right or not."""
    outer = json.loads(KEPT["text"])
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(outer))
        if not found:
            break
        *way, last = data.draw(st.sampled_from(found))
        inner: Any = outer
        for key in way:
            inner = inner[key]
        how = data.draw(st.sampled_from(["replace", "remove", "double", "swap"]))
        if how == "remove":
            del inner[last]
        elif how == "double" and isinstance(inner, list):
            inner.append(inner[last])
        elif how == "swap" and isinstance(inner, list):
            inner.reverse()
        else:
            inner[last] = data.draw(ANYTHING)
    right = isinstance(outer, dict) and "checkpoint" in outer and data.draw(st.booleans())
    text = packed(outer["checkpoint"]) if right else json.dumps(outer).encode()
    equal_state_or_named_error(saved, text)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4), st.integers(0, 10**6))
def test_any_bytes_give_equal_state_or_a_named_error(
    saved: tidegate.Checkpoint, changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(KEPT["text"])
    for at, value in changes:
        data[at % len(data)] = value
    if cut % 3 == 0:
        del data[cut % len(data) :]
    equal_state_or_named_error(saved, bytes(data))


def test_two_ranks_with_one_number_are_not_a_checkpoint(saved: tidegate.Checkpoint) -> None:
    (saved.directory / "rank0.json").write_bytes(KEPT["text"])
    shutil.copy(saved.directory / "rank0.json", saved.directory / "rank1.json")
    try:
        assert tidegate.find_checkpoints(saved.directory.parent) == []
    finally:
        (saved.directory / "rank1.json").unlink()
