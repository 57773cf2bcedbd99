"""The rule of AdamW and Adam (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; Kingma and Ba)."""

from __future__ import annotations

from tidegate.rules.rule import Hyperparameter, StateTensor, UpdateRule

RULE = UpdateRule(
    name="adamw",
    tensors=(StateTensor("exp_avg"), StateTensor("exp_avg_sq")),
    hyperparameters=(
        Hyperparameter("lr", 1e-3),
        Hyperparameter("betas", (0.9, 0.999), below=1.0),
        Hyperparameter("eps", 1e-8),
        Hyperparameter("weight_decay", 1e-2),
        Hyperparameter("decoupled_weight_decay", True),
    ),
    flops_per_param=17,
)
