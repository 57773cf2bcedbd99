"""Plain PyTorch: optimizer state on two storage paths, and a checkpoint to resume from."""

from __future__ import annotations

import argparse
from pathlib import Path

import tidegate
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("plain-pytorch"), help="paths and checkpoints go here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--daemon", help="URL of a tidegate daemon")
    options = parser.parse_args()

    paths = {name: options.folder / name for name in ("nvme", "pfs")}
    for path in paths.values():
        path.mkdir(parents=True, exist_ok=True)
    # The model goes where it stays first: the optimizer works where its parameters are.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 1)
    ).to(device)
    offload = tidegate.Offload(paths=paths, host_cache=0, subgroup_numel=50_000)
    with tidegate.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, offload=offload) as optimizer:
        tidegate.attach(optimizer, model, run="plain-pytorch", daemon=options.daemon)
        checkpoints = options.folder / "checkpoints"
        if found := tidegate.find_sound_checkpoint(checkpoints):
            # Weights first: the state on the paths belongs to them.
            model.load_state_dict(torch.load(found.folder / "model.pt"))
            optimizer.load_checkpoint(found)
        first = optimizer.num_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (first + step + 1) / 10))
        for step in range(first, first + options.steps):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step)).to(device)
            loss = (model(x).squeeze() - x.square().mean(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.log(loss=loss.item())
            optimizer.step()
            schedule.step()
        split = optimizer.effective_knobs()["tier_split"]
        print(f"steps {first} to {optimizer.num_steps}, loss {loss.item():.4f}, subgroups by path {split}")
        optimizer.save_checkpoint(checkpoints, save_also=lambda to: torch.save(model.state_dict(), to / "model.pt"))


if __name__ == "__main__":
    main()
