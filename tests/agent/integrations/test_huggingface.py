"""The Hugging Face Trainer and Accelerate, for real: the optimizer by argument, figures in the logs, resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tidegate
from tests.documented import program
from tests.services import assert_nothing_grows
from tidegate.agent.integrations.huggingface import TidegateCallback, unwrapped
from tidegate.errors import ConfigError

WINDOW = 16


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (WINDOW,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=WINDOW, use_cache=False,
        )
    )  # fmt: skip


def trainer_of(folder: Path, steps: int, **changes: Any) -> Trainer:
    offload = {"subgroup_numel": 3000, "stride": 2.0, "cpu_threads": 1, **changes.pop("offload", {})}
    model = changes.pop("model", None) or language_model()
    settings = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 2, "logging_steps": 5,
        "save_steps": 10, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, **changes,
    }  # fmt: skip
    return Trainer(
        model=model, args=TrainingArguments(**settings), train_dataset=Tokens(),
        optimizer_cls_and_kwargs=(tidegate.AdamW, {"lr": 1e-2, "offload": tidegate.Offload(**offload)}),
        callbacks=[TidegateCallback(run="trainer")],
    )  # fmt: skip


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


def end(trainer: Trainer) -> None:
    unwrapped(trainer.optimizer).close()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_twenty_steps_equal_ten_and_a_resume_and_another_ten(tmp_path: Path, accumulate: int) -> None:
    whole = trainer_of(tmp_path / "whole", 20, gradient_accumulation_steps=accumulate)
    whole.train()
    part = trainer_of(tmp_path / "part", 10, gradient_accumulation_steps=accumulate)
    part.train()
    resumed = trainer_of(tmp_path / "part", 20, gradient_accumulation_steps=accumulate)
    resumed.train(resume_from_checkpoint=True)
    try:
        assert unwrapped(resumed.optimizer).engine.device.kind == "emulated"
        assert all(map(torch.equal, weights_of(resumed), weights_of(whole)))
        assert not all(map(torch.equal, weights_of(part), weights_of(whole)))
    finally:
        for trainer in (whole, part, resumed):
            end(trainer)


def test_it_trains_as_with_the_trainers_own_adamw(tmp_path: Path) -> None:
    ours = trainer_of(tmp_path / "ours", 5)
    args = TrainingArguments(**{**vars_of(ours), "output_dir": str(tmp_path / "theirs"), "optim": "adamw_torch"})
    theirs = Trainer(model=language_model(), args=args, train_dataset=Tokens())
    ours.train()
    theirs.train()
    try:
        # Trainer keeps biases and norms out of weight decay, with our optimizer, too.
        assert [group["weight_decay"] for group in unwrapped(ours.optimizer).param_groups] == [0.0, 0.0]
        for mine, other in zip(weights_of(ours), weights_of(theirs), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    finally:
        end(ours)


def vars_of(trainer: Trainer) -> dict[str, Any]:
    names = ("max_steps", "per_device_train_batch_size", "learning_rate", "use_cpu", "disable_tqdm", "warmup_steps")
    settings = {name: getattr(trainer.args, name) for name in names}
    return {**settings, "lr_scheduler_type": "constant_with_warmup", "report_to": [], "save_strategy": "no"}


def test_each_log_entry_says_what_the_update_cost_since_the_last(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 15)
    results: list[Any] = []
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TidegateCallback))
    begin = callback.on_train_begin

    def watch(*args: Any, **given: Any) -> None:
        begin(*args, **given)
        assert callback.attachment is not None
        recorder = callback.attachment.recorder
        results.append(recorder)

    callback.on_train_begin = watch  # type: ignore[method-assign]
    trainer.train()
    try:
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(entries) == 3
        seconds = results[0].seconds("tidegate_phase_seconds")
        measured = seconds[("update",)] + results[0].rows("tidegate_update_spill_seconds_total")[()]
        assert sum(entry["tidegate_update_seconds"] for entry in entries) == pytest.approx(measured, rel=1e-3)
        assert all(0 <= e["tidegate_stall_seconds"] <= e["tidegate_update_seconds"] for e in entries)
        assert all("of the step" in entry["tidegate_verdict"] for entry in entries)
        assert callback.attachment is None
        assert unwrapped(trainer.optimizer).attachment is None
    finally:
        end(trainer)


def test_the_progress_bar_shows_what_the_update_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Trainer clips, so gradients are copied twice, and the remedy makes the sentence longer than what is shown."""
    trainer = trainer_of(tmp_path, 5, disable_tqdm=False)
    trainer.train()
    end(trainer)
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "copied again" in entry["tidegate_verdict"]
    shown = capsys.readouterr().out
    assert "too long to display" not in shown
    sentence = re.search(r"'tidegate_verdict': ['\"](.+?)['\"]", shown)
    assert sentence
    assert entry["tidegate_verdict"].startswith(f"{sentence[1]}; ")


def test_a_training_that_raised_can_be_begun_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 5)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, TidegateCallback))
    compute, raised = trainer.compute_loss, []

    def once(*args: Any, **given: Any) -> Any:
        if not raised:
            raised.append(True)
            raise RuntimeError("out of memory, say")
        return compute(*args, **given)

    trainer.compute_loss = once
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert callback.attachment is not None
    trainer.train()
    assert callback.attachment is None
    assert trainer.state.global_step == 5
    end(trainer)


def test_what_cannot_work_is_said_when_training_begins(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 5, offload={"gradients": "release"})
    with pytest.raises(ConfigError, match="Use gradients='keep'"):
        trainer.train()
    assert trainer.state.global_step == 0
    end(trainer)


def test_another_optimizer_is_named(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    callback = TidegateCallback(run="trainer")
    trainer = Trainer(model=language_model(), args=args, train_dataset=Tokens(), callbacks=[callback])
    with pytest.raises(ConfigError, match=r"uses AdamW, not tidegate\.AdamW|optimizer_cls_and_kwargs"):
        trainer.train()


def test_accelerate_prepares_it() -> None:
    model = torch.nn.Linear(5, 5)
    accelerator = Accelerator(cpu=True)
    with tidegate.AdamW(model.parameters(), lr=0.1, offload=tidegate.Offload(subgroup_numel=10)) as optimizer:
        plain = torch.nn.Linear(5, 5)
        plain.load_state_dict(model.state_dict())
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        assert unwrapped(wrapped) is optimizer
        with tidegate.attach(wrapped, prepared, run="accelerate"):
            for step in range(5):
                x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
                for net, one in ((prepared, wrapped), (plain, theirs)):
                    one.zero_grad()
                    accelerator.backward(net(x).square().mean()) if net is prepared else net(
                        x
                    ).square().mean().backward()
                accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                wrapped.step()
                theirs.step()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_the_program_of_the_documentation_trains_with_accelerate() -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(8)), batch_size=4)
    given = {"model": language_model(), "batches": data}
    exec(program("frameworks", "Accelerate"), given)
    assert given["optimizer"].optimizer.num_steps == 2
    before = language_model().parameters()
    assert not any(map(torch.equal, given["model"].parameters(), before))


def test_accelerate_prepares_a_model_that_was_converted_after_the_optimizer_was_built() -> None:
    model = torch.nn.Linear(5, 5)
    with tidegate.AdamW(model.parameters(), lr=0.1, offload=tidegate.Offload(subgroup_numel=10)) as optimizer:
        model.to(torch.bfloat16)
        _, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
        model(torch.ones(3, 5, dtype=torch.bfloat16)).square().mean().backward()
        wrapped.step()
        assert {layout.weight_bytes for layout in optimizer.engine.subgroups} == {2}
        assert all(values["remainder"].any() for values in optimizer.state_dict()["state"].values())


def test_a_second_trainer_for_the_same_model_takes_over(tmp_path: Path) -> None:
    first = trainer_of(tmp_path / "first", 3)
    first.train()
    second = trainer_of(tmp_path / "second", 3, model=first.model)
    second.train()
    args = TrainingArguments(**{**vars_of(first), "output_dir": str(tmp_path), "optim": "adamw_torch"})
    model = language_model()
    for _ in range(2):
        Trainer(model=model, args=args, train_dataset=Tokens()).train()
    try:
        for mine, other in zip(weights_of(second), model.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach(), rtol=0, atol=1e-6)
    finally:
        end(second)


@pytest.mark.slow
def test_trainers_of_one_model_leave_nothing_behind(tmp_path: Path) -> None:
    model = language_model()
    assert_nothing_grows(
        lambda number: trainer_of(tmp_path / str(number), 3, model=model, save_strategy="no").train(), rounds=5
    )


@pytest.mark.slow
def test_the_program_with_accelerate_leaves_nothing_behind() -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(8)), batch_size=4)
    model = language_model()
    assert_nothing_grows(
        lambda _: exec(program("frameworks", "Accelerate"), {"model": model, "batches": data}), rounds=5
    )
