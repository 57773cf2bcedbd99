"""Gradient descent without momentum, in torch operations."""

from tidegate.kernels.arithmetic.implementation import Implementation
from tidegate.rules.rule import find


def scalars(lr, step, grad_scale):
    return lr * grad_scale


def step(weight, grad, tensors, rate):
    return weight - grad * rate


IMPLEMENTATION = Implementation(rule=find("sgd_plain"), scalars=scalars, step=step)
