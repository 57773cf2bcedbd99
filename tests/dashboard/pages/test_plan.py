"""Plan: the capacity planner as a form."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st_

from tests.dashboard.screen import again, page, text
from tidegate.capacity.machine import AUX_BYTES, GPUS
from tidegate.dashboard.data.plan_question import Question, names

QUESTIONS = st_.builds(
    Question,
    model=st_.sampled_from(names()),
    gpu=st_.sampled_from(sorted(GPUS)),
    gpus=st_.integers(1, 64),
    nodes=st_.integers(1, 4096),
    gpu_memory=st_.floats(0, 1024),
    host_memory=st_.floats(1, 65_536),
    paths=st_.sampled_from(["", "nvme:6.9/5.3", "nvme:6.9/5.3:duplex\npfs:20/15:all-nodes"]),
    weight=st_.sampled_from(list(AUX_BYTES)),
    checkpointing=st_.booleans(),
    flop_share=st_.floats(0.01, 1.0),
)


@given(QUESTIONS)
def test_an_address_holds_the_whole_question(asked: Question) -> None:
    assert Question.of_query(asked.query()) == asked


def test_what_an_address_says_wrongly_is_as_it_is_at_first() -> None:
    assert Question.of_query({"gpus": "many", "nodes": "2", "run": "llama"}) == Question(nodes=2)
    assert Question.of_query({"gpu_memory": "nan", "flop_share": "NaN"}) == Question()
    assert Question().query() == {}


def test_a_machine_that_is_large_enough_gets_times_places_and_recipes() -> None:
    app = page("plan", model="7B", gpus="4", host_memory="512")
    shown = text(app)
    assert "on one node of 4 GPUs fits:" in shown
    for words in (
        "iteration",
        "State lives in",
        "Memory of one GPU",
        "Phases",
        "Busy in the update",
        "What would help",
    ):
        assert words in shown, words
    assert "tidegate" in app.code[0].value
    assert [tab.label for tab in app.tabs] == ["Python", "DeepSpeed"]


def test_a_machine_that_is_too_small_is_told_what_is_missing() -> None:
    app = page("plan", model="7B", gpus="1", host_memory="8", paths="")
    shown = text(app)
    assert "does not fit" in shown
    assert "are missing" in shown
    assert not app.code


def test_an_edit_is_answered_at_once_and_in_the_address() -> None:
    app = page("plan", model="7B", gpus="4", host_memory="512")
    next(field for field in app.number_input if field.label == "Nodes").set_value(2)
    assert "on 2 nodes of 4 GPUs" in text(again(app))
    assert app.query_params["nodes"] in ("2", ["2"])


def test_what_cannot_be_is_a_sentence() -> None:
    app = page("plan", model="7B", paths="nvme at full speed")
    assert "This cannot be planned." in text(app)
    assert "NAME:READ/WRITE" in app.error[0].value.replace("\\", "")
