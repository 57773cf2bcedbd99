"""Train a small language model on the bytes of a text with Lightning.

python lightning_module.py --text FILE
python lightning_module.py --resume
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

WINDOW, WIDTH = 64, 96


class Windows(Dataset[torch.Tensor]):
    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // WINDOW

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index * WINDOW : (index + 1) * WINDOW]


class Text(lightning.LightningDataModule):
    def __init__(self, text: Path, batch_size: int) -> None:
        super().__init__()
        self.windows, self.batch_size = Windows(text.read_bytes()), batch_size
        self.split = len(self.windows) * 9 // 10

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Subset(self.windows, range(self.split)), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Subset(self.windows, range(self.split, len(self.windows))), self.batch_size)


class LanguageModel(lightning.LightningModule):
    def __init__(self, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(WINDOW, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=self.hparams.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("lightning-module"), help="logs and checkpoints go here")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"], "argparse.py"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop-at", type=int, help="end at this step of the schedule (default: at the last)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_steps=args.stop_at or args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        log_every_n_steps=5,
        val_check_interval=40,
        default_root_dir=args.out,
        logger=CSVLogger(args.out, name=None, version="resumed" if args.resume else "begun"),
        callbacks=[
            LearningRateMonitor(logging_interval="step"),
            ModelCheckpoint(args.out / "checkpoints", save_last=True, save_on_train_epoch_end=False),
        ],
    )
    last = args.out / "checkpoints" / "last.ckpt" if args.resume else None
    trainer.fit(LanguageModel(lr=3e-3, steps=args.steps), Text(args.text, batch_size=8), ckpt_path=last)


if __name__ == "__main__":
    main()
