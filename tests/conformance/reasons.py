"""Why a test of theirs does not pass with ours: the first rule whose patterns fit the test and its message."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["by design", "not supported", "defect"]

RULES: tuple[tuple[str, str, Kind, str], ...] = (
    ("", "(amsgrad|capturable|differentiable)=True is not supported", "not supported",
     "amsgrad, capturable and differentiable are not offered, and refused when asked for"),
    ("", "has dtype torch.(complex|float64)", "not supported", "weights are float32, bfloat16 or float16"),
    ("contiguous_False", "has gaps in memory", "by design",
     "weights with gaps in memory are refused: a subgroup is a flat run of memory"),
    ("deepcopy", "cannot be copied or pickled", "by design",
     "an optimizer that owns threads and buffers is not copied; state_dict() is what moves its state"),
    ("on_meta", "on meta", "by design", "weights without memory are refused at construction, not at step()"),
    ("matches_forloop.*(bfloat16|float16)", "attribute 'dtype' do not match: torch.float32", "by design",
     "16-bit weights have float32 moments and masters, torch computes in 16 bits: they differ by roundings"),
    (r"test_errors.*\[(beta1 should|weight_decay should|Tensor lr must|invalid param type)",
     "does not match .*(out of range|it must have|must be an iterable)", "by design",
     "the same error type, in words that name value and bound"),
    (r"test_errors.*\[(lr as Tensor|betas)", "NoneType", "by design",
     "a scalar tensor, or a mix of tensors and floats, is taken: there is no foreach that could not"),
    (r"test_errors.*\[a param group cannot have duplicate", "already|twice|more than once", "by design",
     "a parameter given twice is refused, not only warned of"),
)  # fmt: skip


def reason(test: str, message: str) -> tuple[Kind, str]:
    """Kind and reason. What no rule explains is a defect, of ours or of this list."""
    for on_test, on_message, kind, why in RULES:
        if re.search(on_test, test) and re.search(on_message, message, re.DOTALL):
            return kind, why
    return "defect", message.splitlines()[0] if message else "no message"
