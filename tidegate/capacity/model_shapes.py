"""Shapes of transformer models: how many parameters they have, by name or from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tidegate.errors import ConfigError

_LLAMA_VOCAB: Final = 32_000
MAX_PARAMS: Final = 10**13
"""Largest accepted number of parameters of a model. A larger number is most likely a mistake in a config, and planning
would take minutes."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The shape of a transformer model: equal blocks, each with attention and an inner (feed-forward) layer. Norms and
    biases are left out (below 0.1 % of the parameters).

    ffn: width of the inner layer. gated: the inner layer has three matrices instead of two (SwiGLU). experts: number of
    inner layers of each block, of which `active_experts` process a token. tied: the output layer uses the embedding's
    matrix.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    head_width: int = 0
    """Width of one attention head; 0 for hidden / heads."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "active_experts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} of model {self.name} must be at least 1.")
        if self.active_experts > self.experts:
            raise ConfigError(
                f"active_experts={self.active_experts} of model {self.name} must be at most its {self.experts} experts."
            )
        if self.params > MAX_PARAMS:
            raise ConfigError(f"Model {self.name} has more than {MAX_PARAMS:.0e} parameters: check its config.")

    @property
    def block_params(self) -> int:
        """Parameters of one block, all experts."""
        return self._attention + self.experts * self._inner

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding; the matrix of the output layer has the same number."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters of the model."""
        return self.layers * self.block_params + self.embedding_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Number of parameters that a token is multiplied with: those of the attention, the active experts and the
        output layer, but not of the input embedding (which is a table look-up)."""
        inner = self.active_experts * self._inner
        return self.layers * (self._attention + inner) + self.embedding_params

    @property
    def _attention(self) -> int:
        width = self.head_width or self.hidden // self.heads
        return 2 * self.hidden * width * (self.heads + self.kv_heads)

    @property
    def _inner(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """The shape of a GPT model of the papers (Deep Optimizer States, Table 2; MLP-Offload, Table 2): the inner layers
    have four times the hidden width, and the vocabulary is that of Llama 2."""
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=_LLAMA_VOCAB,
        tied=True,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = _LLAMA_VOCAB
) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, gated=True
    )


PAPER_MODELS: Final[dict[str, ModelShape]] = {
    shape.name: shape
    for shape in (
        _gpt("7B", 32, 4096, 32),
        _gpt("8.3B", 72, 3072, 24),
        _gpt("10B", 50, 4096, 32),
        _gpt("13B", 40, 5120, 40),
        _gpt("20B", 48, 6144, 64),
        _gpt("40B", 128, 5120, 40),
        _gpt("52B", 64, 8192, 64),
        _gpt("70B", 80, 8192, 64),
        _gpt("100B", 124, 8192, 64),
        _gpt("120B", 96, 10240, 80),
        _gpt("130B", 70, 12288, 96),
        _gpt("280B", 72, 16384, 128),
    )
}
"""The models of two papers (Deep Optimizer States, Table 2; MLP-Offload, Table 2), with the layers and widths stated
there. A name may differ from the number of parameters: `20B` has 48 layers, and thus 22 billion parameters."""

MODELS: Final[dict[str, ModelShape]] = {
    **PAPER_MODELS,
    **{
        shape.name: shape
        for shape in (
            _llama("llama-7b", 32, 4096, 32, 32, 11008),
            _llama("llama-13b", 40, 5120, 40, 40, 13824),
            _llama("llama-70b", 80, 8192, 64, 8, 28672),
            _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128_256),
            _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128_256),
            _llama("llama-3-405b", 126, 16384, 128, 8, 53248, 128_256),
            _llama("mistral-7b", 32, 4096, 32, 8, 14336),
        )
    },
}
"""Shapes of models by name: the models of the two papers (`PAPER_MODELS`), and common models."""

_GATED: Final = frozenset(
    {
        "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "granitemoe", "llama",
        "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi3", "phimoe", "qwen2", "qwen3", "smollm3", "stablelm",
    }
)  # fmt: skip
"""Values of `model_type` in Hugging Face configs: models of equal blocks with gated inner layers (three matrices)."""
_UNGATED: Final = frozenset(
    {
        "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "nemotron", "opt",
        "persimmon", "phi", "starcoder2",
    }
)  # fmt: skip
"""Values of `model_type` in Hugging Face configs: models of equal blocks whose inner layers are not gated (two
matrices)."""
_OTHER_SHAPES: Final = ("kv_lora_rank", "is_encoder_decoder", "moe_intermediate_size", "ffn_config", "attn_config")
"""Config keys of architectures whose parameters cannot be counted here."""
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "active_experts": ("num_experts_per_tok",),
    "head_width": ("head_dim",),
}


def model_named(name: str) -> ModelShape:
    """The shape with this name (upper or lower case); ConfigError with the known names otherwise."""
    found = {known.lower(): shape for known, shape in MODELS.items()}.get(name.lower())
    if found is None:
        raise ConfigError(
            f"The model {name!r} is not known. Give the config.json of a Hugging Face model, or one of: "
            f"{', '.join(MODELS)}."
        )
    return found


def model_from(where: str) -> ModelShape:
    """The shape of the model at `where`: a name in `MODELS`, a Hugging Face config file, or a folder with a
    config.json."""
    if where.lower() in (name.lower() for name in MODELS):
        return model_named(where)
    file = Path(where)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        return model_named(where)
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a Hugging Face config: {error}.") from error
    return model_from_config(values, name=file.parent.name if file.name == "config.json" else file.stem)


def model_from_config(values: Any, *, name: str = "model") -> ModelShape:
    """The shape that a Hugging Face config (the parsed JSON) describes.

    ConfigError when a size is missing or not a number, and for architectures whose parameters this function cannot
    count correctly (other model types, latent attention, encoders with decoders).
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"The config of {name} is not a JSON object: give the config.json of a Hugging Face model.")
    values = values.get("text_config") or values
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"text_config in the config of {name} is not a JSON object: {str(values)[:40]!r}. Give the config.json of "
            "a Hugging Face model."
        )
    kind = str(values.get("model_type", ""))
    for key in _OTHER_SHAPES:
        if values.get(key):
            raise ConfigError(
                f"The config of {name} (model_type {kind!r}) has {key}: parameters of such models cannot be counted. "
                "Give the name of a model of similar size."
            )
    sizes = {size: _size(values, keys, name) for size, keys in _NAMES.items()}
    missing = [_NAMES[size][0] for size in ("layers", "hidden", "heads", "vocab") if not sizes[size]]
    if missing:
        raise ConfigError(f"The config of {name} lacks {', '.join(missing)}: is it the config of a language model?")
    if kind not in _GATED | _UNGATED:
        raise ConfigError(
            f"The config of {name} has model_type {kind[:40]!r}, whose parameters cannot be counted. Known are "
            f"{', '.join(sorted(_GATED | _UNGATED))}. Give the name of a model of similar size."
        )
    one_kv_head = values.get("multi_query") and not values.get("new_decoder_architecture")
    return ModelShape(
        name=name,
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=1 if one_kv_head else sizes["kv_heads"] or sizes["heads"],
        ffn=sizes["ffn"] or 4 * sizes["hidden"],
        vocab=sizes["vocab"],
        gated=kind in _GATED,
        # Default if the config has no value: gated models other than Gemma have a separate matrix in the output layer.
        tied=bool(values.get("tie_word_embeddings", kind.startswith("gemma") or kind in _UNGATED)),
        experts=sizes["experts"] or 1,
        active_experts=sizes["active_experts"] or 1,
        head_width=sizes["head_width"],
    )


def _size(values: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    """The value of the first key of `keys` that the config `values` contains; 0 if it contains none of them.
    ConfigError if the value is not a whole number above 0. name: the model, for the message."""
    for key in keys:
        if (value := values.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key}={value!r} in the config of {name} must be a whole number from 1.")
            return value
    return 0
