"""The model shapes for iterations: Llama models with random weights, and the GPU memory that they may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model shape. device_gib: GPU memory in GiB that a training with offload may use, whatever the GPU has."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    device_gib: int
    vocabulary: int = 32_000
    sequence: int = 2048

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads,
            max_position_embeddings=self.sequence, use_cache=False,
        )  # fmt: skip

    def build(self, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        """The model, created on `device` in train mode, with activation checkpointing."""
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = LlamaForCausalLM(self.config())
        finally:
            torch.set_default_dtype(default)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        return model  # type: ignore[no-any-return]


SHAPES: Final[dict[str, Shape]] = {
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, key_value_heads=8, device_gib=16),
    "3b": Shape(hidden=3072, intermediate=8192, layers=28, heads=24, key_value_heads=8, device_gib=24),
    "7b": Shape(hidden=4096, intermediate=11_008, layers=32, heads=32, key_value_heads=32, device_gib=48),
    "toy": Shape(
        hidden=32, intermediate=64, layers=2, heads=2, key_value_heads=2, device_gib=1, vocabulary=64, sequence=16
    ),
}
