"""The rule of AdamW and Adam as DeepSpeed's cpu_adam rounds it. The state is that of the rule "adamw"."""

from __future__ import annotations

from dataclasses import replace

from tidegate.rules import adamw
from tidegate.rules.rule import Hyperparameter

RULE = replace(
    adamw.RULE,
    name="deepspeed_adamw",
    hyperparameters=(*adamw.RULE.hyperparameters, Hyperparameter("several_betas", False)),
    same_state_as="adamw",
)
"""several_betas: whether the param groups have different betas, on which cpu_adam's rounding depends."""
