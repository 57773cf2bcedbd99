"""Gradient descent with a momentum in bf16, for matrices."""

from tidegate.rules.rule import Hyperparameter, StateTensor, UpdateRule

RULE = UpdateRule(
    name="momentum",
    tensors=(StateTensor("velocity", "bfloat16"), StateTensor("largest")),
    hyperparameters=(Hyperparameter("lr", 1e-2), Hyperparameter("momentum", 0.9, below=1.0)),
    flops_per_param=5,
    least_dims=2,
    most_dims=2,
)
