"""Gradient descent with a momentum in bf16, in torch operations."""

import torch

from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.rules.rule import find


def scalars(lr, momentum, step, grad_scale):
    return lr, momentum, grad_scale


def step(weight, grad, tensors, values):
    velocity, largest = tensors
    lr, momentum, grad_scale = values
    velocity.copy_(velocity.float() * momentum + grad * grad_scale)
    largest.copy_(torch.maximum(largest, velocity.float().abs()))
    return weight - velocity.float() * lr


IMPLEMENTATION = Implementation(rule=find("momentum"), scalars=scalars, step=step)
