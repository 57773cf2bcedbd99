"""What all messages of the wire are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from tidegate.knobs.knobs import check_path_name

# What comes from outside has bounds: of the length of a text, of the number of items, of a number. A text with any such
# bound is also checked to be text that UTF-8 can encode: lone surrogates are refused.
Label = Annotated[str, Field(max_length=64)]
Key = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=2000)]
# Strict: "5" is no number, false no zero, 1 no truth. Whoever sends such has a mistake that should be told.
Number = Annotated[float, Field(strict=True)]
"""Any, infinite and NaN included: what training makes."""
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Value = Annotated[float, Field(strict=True, ge=-1e18, le=1e18)]
Moment = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
"""Seconds since the epoch, or since the origin of a timeline."""
Duration = Annotated[float, Field(strict=True, ge=0, le=1e9)]
"""Seconds, as ranks report them. Sums of such are finite, and so are quotients with what is not 0."""
Speed = Annotated[float, Field(strict=True, ge=0, le=1e18)]
"""Bytes or parameters per second."""
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Sum = Annotated[int, Field(strict=True, ge=0)]
"""Of counts of many ranks."""
DurationBy = Annotated[dict[Label, Duration], Field(max_length=128)]
CountBy = Annotated[dict[Label, Count], Field(max_length=128)]
SumBy = dict[Label, Sum]

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
AgentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""It is a part of addresses: no name of a folder, no `/`."""
Rank = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
# The check has the bound, and says more than a bound would.
PathName = Annotated[str, AfterValidator(check_path_name), WithJsonSchema({"type": "string", "maxLength": 32})]
DeviceKind = Literal["cuda", "emulated"]
Liveness = Literal["live", "stale", "lost", "finished"]
KnobText = Annotated[str, Field(max_length=4096)]
"""A `tier_split` that names 64 paths with names of 32 characters fits."""
KnobChanges = Annotated[dict[Key, Value | Whole | KnobText], Field(max_length=128)]


class Message(BaseModel):
    """Base of all messages: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
