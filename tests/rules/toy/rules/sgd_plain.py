"""Gradient descent without momentum: a rule without state."""

from tidegate.rules.rule import Hyperparameter, UpdateRule

RULE = UpdateRule(name="sgd_plain", tensors=(), hyperparameters=(Hyperparameter("lr", 1e-2),), flops_per_param=2)
