"""`tidegate plan`: the twelve models of the papers, a Hugging Face config, and inputs that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tidegate.capacity.model_shapes import PAPER_MODELS
from tidegate.cli.main import app, main
from tidegate.cli.plan import _load_calibration
from tidegate.errors import ConfigError
from tidegate.speeds.rate_card import RateCard
from tidegate.speeds.saved_calibration import VERSION, Calibration

NODE = ("--gpus", "4", "--gpu-memory", "80", "--host-memory", "512", "--path", "nvme:6.9/5.3", "--path", "pfs:3.6/3.6")


def plan(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def answer(*arguments: str) -> dict[str, Any]:
    return json.loads(plan(*arguments, "--json"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_every_model_of_the_papers_has_an_answer(model: str) -> None:
    found = answer("--model", model, *NODE, "--nodes", "4", "--no-advice")
    assert found["fits"]
    assert found["iteration_seconds"] == pytest.approx(sum(found["phases"].values()))
    assert sum(found["state_bytes"].values()) == pytest.approx(10 * found["model"]["params"], rel=1e-6)
    assert found["configuration"]["deepspeed"]["tidegate"]["static_ratio"] == found["knobs"]["static_ratio"]
    assert found["changes"] == []


def test_people_read_the_same() -> None:
    text = plan(
        "--model",
        "llama-70b",
        *NODE[:-4],
        "--path",
        "nvme:6.9/5.3:3.2TB:endure=5PB",
        "--path",
        "pfs:3.6/3.6",
        "--no-advice",
    )
    for part in (
        "Fits. An iteration takes ",
        "The longest phase waits for nvme",
        "Path nvme is written ",
        "its endurance lasts ",
        "Assumed:",
        "tidegate.Offload(",
        '"zero_optimization"',
    ):
        assert part in text, part


def test_what_does_not_fit_is_an_answer_too() -> None:
    found = answer("--model", "280B", *NODE)
    assert not found["fits"]
    assert found["configuration"] == {}
    assert found["shortages"][0]["missing_bytes"] > 0
    assert [change["gain"] for change in found["changes"]] == [None]
    text = plan("--model", "280B", *NODE)
    assert "Does not fit." in text
    assert "What would help most:" in text


def test_a_hugging_face_config_and_measured_rates(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 48, "n_embd": 6144, "n_head": 64, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rates = {"h2d_bytes_per_second": 5e9, "d2h_bytes_per_second": 5e9, "cpu_params_per_second": 1e9}
    calibration = {
        "version": VERSION, "measured_at": 0.0, "hardware": {}, "cpu_params_per_second_by_threads": {},
        "card_threads": 1, "rates": rates,
    }  # fmt: skip
    (tmp_path / "rates.json").write_text(json.dumps(calibration))
    machine = ("--model", str(tmp_path), "--gpus", "4", "--gpu", "a100-40")
    typical, measured = answer(*machine), answer(*machine, "--rates", str(tmp_path / "rates.json"))
    assert typical["model"]["params"] == pytest.approx(22e9, rel=0.02)
    assert measured["machine"]["cpu_params_per_second"] == 1e9
    assert measured["phases"]["update"] > typical["phases"]["update"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "nope"), "The model 'nope' is not known"),
        (("--model", "7B", "--gpus", "0"), "gpus=0"),
        (("--model", "7B", "--gpu-memory", "-1"), "gpu_memory_bytes"),
        (("--model", "7B", "--gpu", "abacus"), "The GPU 'abacus' is not known"),
        (("--model", "7B", "--path", "nvme"), "The path 'nvme' is not NAME:READ/WRITE"),
        (("--model", "7B", "--path", "nvme:1/1", "--path", "nvme:2/2"), "the same name"),
        (("--model", "7B", "--weight", "int8"), "weight='int8'"),
        (("--model", "7B", "--rates", "/nowhere.json"), "has no valid calibration"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tidegate", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "")
    assert shown.err.startswith("tidegate: ")
    assert said in shown.err


CALIBRATION = Calibration(
    card=RateCard(cpu_params_per_second=1e9), hardware={}, cpu_threads={1: 1e9}, card_threads=1, measured_at=0.0
).to_dict()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**CALIBRATION, "version": 1}, "The calibration has version 1, and this Tidegate reads only version 2."),
        ({**CALIBRATION, "rates": {"cpu_params_per_second": -1.0}},
         "cpu_params_per_second=-1.0 in a rate card must be positive."),
        ({name: value for name, value in CALIBRATION.items() if name != "hardware"},
         "The calibration is not valid: 'hardware' is missing."),
        ([], "The calibration is not valid: list indices must be integers or slices, not str."),
    ],
)  # fmt: skip
def test_a_calibration_that_cannot_be_used_is_explained_once(tmp_path: Path, values: object, sentence: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        _load_calibration(file)
    assert str(error.value) == f"{file}: {sentence} Run `tidegate calibrate` again."
