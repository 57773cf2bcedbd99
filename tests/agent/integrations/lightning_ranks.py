"""One rank of a script that trains with Lightning's strategy `ddp`, for test_lightning_callback: ours beside torch's.

Lightning itself starts the script once more, as the second rank.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.agent.integrations.test_lightning import Regression, assert_alike, batches, trainer_of
from tests.agent.integrations.test_lightning_callback import Watched

STEPS = 6


def trainer(folder: Path, steps: int, **settings: Any) -> Any:
    return trainer_of(folder, steps, strategy="ddp", devices=2, gradient_clip_val=0.05, **settings)


def trained(folder: Path, ours: bool, precision: str, callbacks: list[Any]) -> list[Regression]:
    """Models of: a fit, another one of the same model, and one that was saved in between and resumed."""
    whole, saved = Regression(ours), folder / f"{precision}-{ours}.ckpt"
    for _ in range(2):
        trainer(folder, STEPS, precision=precision, callbacks=callbacks, enable_checkpointing=False).fit(
            whole, batches()
        )
    first = trainer(folder, STEPS, precision=precision)
    first.fit(Regression(ours), batches())
    first.save_checkpoint(saved)
    resumed = Regression(ours)
    trainer(folder, 2 * STEPS, precision=precision, callbacks=callbacks).fit(
        resumed, batches(), ckpt_path=saved, weights_only=False
    )
    return [whole, resumed]


def main(folder: Path, daemon: str, token: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    callback = Watched(daemon=daemon, token=token)
    for precision in ("32-true", "bf16-mixed"):
        theirs = trained(folder, False, precision, [])
        for mine, other in zip(trained(folder, True, precision, [callback]), theirs, strict=True):
            assert_alike(mine, other)
            same_on_all_ranks(mine)
    assert callback.steps == [STEPS] * 6, callback.steps
    assert [attachment.recorder.number for attachment in callback.seen] == 2 * [STEPS, STEPS, 2 * STEPS]
    assert {attachment.world_size for attachment in callback.seen} == {2}
    (folder / f"ddp-{dist.get_rank()}").touch()
    dist.barrier()
    dist.destroy_process_group()


def same_on_all_ranks(model: torch.nn.Module) -> None:
    for param in model.parameters():
        of_first = param.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(param, of_first)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
