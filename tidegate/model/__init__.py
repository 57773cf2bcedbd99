"""The performance model: measured rates, the papers' closed forms, and the simulator."""

from tidegate.model.bound import Bound, bound
from tidegate.model.choose import best
from tidegate.model.equations import cpu_to_device_ratio, ratio_from_stride, stride_from_ratio
from tidegate.model.rates import PathRates, RateCard
from tidegate.model.settled import Rank
from tidegate.model.simulate import simulate
from tidegate.model.what_if import Prediction, what_if

__all__ = [
    "Bound",
    "PathRates",
    "Prediction",
    "Rank",
    "RateCard",
    "best",
    "bound",
    "cpu_to_device_ratio",
    "ratio_from_stride",
    "simulate",
    "stride_from_ratio",
    "what_if",
]
