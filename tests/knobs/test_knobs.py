"""Every kind of knob: what it takes, what it refuses and how it says so, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import ConfigError, KnobError
from tidegate.knobs.kinds import KnobSpec, show_size
from tidegate.knobs.knobs import PATH_KNOBS, SPECS, Knobs, check_path_name, same, show, spec, specs_for, weights_of
from tidegate.wire.agent import AgentHello
from tidegate.wire.knobs import KnobBound, KnobPatch

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "given", "value", "shown"),
    [
        ("stride", "3", 3.0, "3"),
        ("stride", " OFF ", "off", "off"),
        ("static_ratio", 0.25, 0.25, "0.25"),
        ("host_cache", "auto", "auto", "auto"),
        ("host_cache", "12GiB", 12 * GIB, "12GiB"),
        ("host_cache", "12 gib", 12 * GIB, "12GiB"),
        ("host_cache", "512MB", 512_000_000, "512MB"),
        ("host_cache", "1.5TiB", 3 * 2**39, "1.5TiB"),
        ("host_cache", 0, 0, "0"),
        ("host_cache", "0", 0, "0"),
        ("host_cache", "64B", 64, "64B"),
        ("host_cache", 4096.0, 4096, "4KiB"),
        ("host_cache", "8589934592", 8 * GIB, "8GiB"),
        ("host_cache", "0.3GB", 300_000_000, "300MB"),
        ("host_cache", "1.1GiB", int(1.1 * GIB), "1.1GiB"),
        ("host_cache", 12_345_678_901, 12_345_678_901, "11.5GiB"),
        ("tier_split", "AUTO", "auto", "auto"),
        ("tier_split", " Eq1 ", "eq1", "eq1"),
        ("tier_split", "nvme:2,pfs:1", "nvme:2,pfs:1", "nvme:2,pfs:1"),
        ("tier_split", " pfs : 1.0 , nvme : 2 ", "nvme:2,pfs:1", "nvme:2,pfs:1"),
        ("tier_split", "nvme:4,pfs:2", "nvme:4,pfs:2", "nvme:4,pfs:2"),
        ("tier_split", {"pfs": 1, "nvme": 0.1}, "nvme:0.1,pfs:1", "nvme:0.1,pfs:1"),
        ("tier_split", "nvme:1,pfs:0", "nvme:1,pfs:0", "nvme:1,pfs:0"),
        ("order", "Pinned", "pinned", "pinned"),
        ("order", "alternate", "alternate", "alternate"),
    ],
)
def test_what_is_taken(name: str, given: object, value: object, shown: str) -> None:
    parsed = spec(name).parse(given)
    assert (parsed, type(parsed)) == (value, type(value))
    assert show(name, parsed) == shown
    assert spec(name).parse(parsed) == parsed


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stride", True, "stride=True is out of range: a number from 1"),
        ("stride", None, "'auto' or 'off'"),
        ("host_cache", -1, "host_cache=-1 is out of range: bytes from 0 to 1024TiB, as in 12GiB or 512MB or 'auto'"),
        ("host_cache", "0.5", "out of range"),
        ("host_cache", 0.5, "out of range"),
        ("host_cache", "12 parsecs", "out of range"),
        ("host_cache", "GiB", "out of range"),
        ("host_cache", "2048TiB", "out of range"),
        ("host_cache", float("nan"), "out of range"),
        ("host_cache", float("inf"), "out of range"),
        ("host_cache", True, "out of range"),
        ("host_cache", None, "out of range"),
        ("tier_split", "nvme", "gives 'nvme' the weight '': a number from 0 to 1e+06 is needed, as in nvme:2,pfs:1"),
        ("tier_split", "nvme:x", "the weight 'x'"),
        ("tier_split", "nvme:-1,pfs:1", "the weight '-1'"),
        ("tier_split", "nvme:inf", "the weight 'inf'"),
        ("tier_split", "nvme:nan", "the weight 'nan'"),
        ("tier_split", {"nvme": True}, "the weight True"),
        ("tier_split", "nvme:0,pfs:0", "has no weight above 0"),
        ("tier_split", "nvme:1,nvme:2", "names a path twice"),
        ("tier_split", "host:1", "cannot be called 'host'"),
        ("tier_split", "NVMe:1", "cannot be called 'NVMe'"),
        ("tier_split", "", "cannot be called ''"),
        ("tier_split", {}, "has no weight above 0"),
        ("tier_split", 2.0, "tier_split=2.0 is out of range: weights of paths, as in nvme:2,pfs:1 or 'auto'"),
        ("order", "fast", "order='fast' is out of range: 'auto' or 'pinned' or 'alternate'"),
        ("order", 1, "order=1 is out of range"),
    ],
)
def test_what_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(KnobError) as error:
        spec(name).parse(value)
    assert said in str(error.value)
    assert error.value.knob == name


@given(st.integers(0, 2**50))
def test_a_size_that_is_shown_is_nearly_the_size(nbytes: int) -> None:
    again = spec("host_cache").parse(show_size(nbytes))
    assert isinstance(again, int)
    assert abs(again - nbytes) <= nbytes * 5e-4


NAMES = st.from_regex(r"[a-z0-9_-]{1,32}", fullmatch=True).filter(lambda name: name not in ("host", "device"))
WEIGHTS = st.dictionaries(NAMES, st.floats(0, 1e6), min_size=1).filter(lambda weights: any(weights.values()))


@given(WEIGHTS)
def test_weights_survive_their_text(weights: Mapping[str, float]) -> None:
    text = spec("tier_split").parse(weights)
    assert weights_of(str(text)) == weights
    assert spec("tier_split").parse(text) == text


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=3), st.sampled_from([2, 3, 10]))
def test_weights_are_the_same_when_their_ratios_are(numbers: list[int], factor: int) -> None:
    one = ",".join(f"p{i}:{n}" for i, n in enumerate(numbers))
    other = ",".join(f"p{i}:{n * factor}" for i, n in enumerate(numbers))
    tenth = ",".join(f"p{i}:{n / 10}" for i, n in enumerate(numbers))
    assert same("tier_split", one, other)
    assert same("tier_split", one, tenth)
    assert same("tier_split", one, f"{one},unused:0")
    assert not same("tier_split", one, f"{one},more:1")
    assert not same("tier_split", one, "auto")
    assert same("tier_split", "auto", "auto")


def test_the_others_are_the_same_when_they_are_equal() -> None:
    assert same("stride", 2, 2.0)
    assert not same("host_cache", 1, "auto")
    assert same("of_the_future", "x", "x")


@pytest.mark.parametrize("name", ["nvme", "a", "0-_z", "x" * 32])
def test_path_names(name: str) -> None:
    assert check_path_name(name) == name


@pytest.mark.parametrize("name", ["", "x" * 33, "NVMe", "a b", "a/b", "é", "host", "device", "nvme\n"])
def test_what_is_no_path_name(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 32 of a-z, 0-9, _ and -"):
        check_path_name(name)
    with pytest.raises(ValueError, match="A path cannot be called"):
        hello(paths=(name,))


def hello(**more: object) -> AgentHello:
    return AgentHello.model_validate(
        {"agent": "a", "run": "r", "rank": 0, "world_size": 1, "host": "h", "pid": 1, "device_kind": "emulated"}
        | {"metrics_address": "", "knobs": {}, "started_at": 0.0}
        | more
    )


def test_a_set_of_before_still_loads_and_has_no_knobs_of_storage() -> None:
    old = {"stride": 2.0, "static_ratio": 0.5}
    knobs = Knobs(**old)  # type: ignore[arg-type]
    assert (knobs.tier_split, knobs.host_cache, knobs.order) == ("auto", "auto", "auto")
    assert knobs.as_dict(paths=False) == old
    assert knobs.as_dict(paths=True) == {**old, "tier_split": "auto", "host_cache": "auto", "order": "auto"}
    assert Knobs(**knobs.changed({"host_cache": "1GiB"}).as_dict(paths=True)).host_cache == GIB  # type: ignore[arg-type]


def test_changes_are_checked_against_the_paths_of_the_run() -> None:
    knobs = Knobs()
    for name, value in (("tier_split", "nvme:1"), ("host_cache", 0), ("order", "auto")):
        with pytest.raises(KnobError, match=rf"{name} .* no storage paths; start it with Offload\(paths=…\)") as error:
            knobs.changed({name: value}, specs_for(()))
        assert error.value.knob == name
        assert knobs.changed({name: value}, specs_for(("nvme",)))
    with pytest.raises(KnobError, match="names 'ssd'; the run's paths are: nvme, pfs"):
        knobs.changed({"tier_split": "nvme:1,ssd:1"}, specs_for(("nvme", "pfs")))
    with pytest.raises(KnobError, match=r"There is no knob 'pace'. The knobs are: stride, static_ratio\.$"):
        knobs.changed({"pace": 1}, specs_for(()))
    with pytest.raises(KnobError, match="weights of the paths b, a, as in b:2,a:1 or 'auto'"):
        knobs.changed({"tier_split": 1}, specs_for(("b", "a")))


def test_desired_knobs_outlive_paths() -> None:
    knobs = Knobs(stride=3, tier_split="nvme:2,pfs:1", host_cache="1GiB", order="pinned")  # type: ignore[arg-type]
    assert knobs.fitted(("pfs", "nvme", "s3")) == knobs
    assert knobs.fitted(("nvme",)) == Knobs(stride=3, host_cache=GIB, order="pinned")
    assert knobs.fitted(()) == Knobs(stride=3)


def test_bounds_travel() -> None:
    for name, found in specs_for(("nvme", "pfs")).items():
        bound = KnobBound.model_validate_json(KnobBound.of(found).model_dump_json())
        assert bound.spec(name) == found
    assert set(KnobBound.model_fields) == {*KnobSpec.__dataclass_fields__} - {"name"}
    assert set(PATH_KNOBS) < set(SPECS)


def test_values_travel_as_they_are() -> None:
    sent = {"stride": 3.0, "host_cache": 2**50 - 1, "tier_split": "nvme:1"}
    got = KnobPatch.model_validate_json(KnobPatch(changes=sent).model_dump_json()).changes
    assert got == sent
    assert [type(value) for value in got.values()] == [float, int, str]
