"""The performance model: measured rates, the papers' closed forms, and the simulator."""

from tidegate.model.equations import cpu_to_device_ratio, ratio_from_stride, stride_from_ratio
from tidegate.model.rates import PathRates, RateCard
from tidegate.model.simulate import Prediction, best_stride, simulate, what_if

__all__ = [
    "PathRates",
    "Prediction",
    "RateCard",
    "best_stride",
    "cpu_to_device_ratio",
    "ratio_from_stride",
    "simulate",
    "stride_from_ratio",
    "what_if",
]
