"""The base class of all messages, and the field types with their bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from tidegate.knobs.knobs import check_path_name

# Input from outside is bounded: the length of texts, the number of items, the range of numbers. A text with a bound is
# also checked to be valid UTF-8: lone surrogates are refused.
Label = Annotated[str, Field(max_length=64)]
Key = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=2000)]
# Strict: "5" is not accepted as a number, false not as 0, 1 not as true. A wrong type is a mistake of the sender, and
# is reported as an error.
Number = Annotated[float, Field(strict=True)]
"""Any number, also infinite and NaN, because training can produce such numbers."""
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Value = Annotated[float, Field(strict=True, ge=-1e18, le=1e18)]
Moment = Annotated[float, Field(strict=True, ge=-1e12, le=1e12)]
"""Seconds since the epoch, or since the origin of a timeline."""
Duration = Annotated[float, Field(strict=True, ge=0, le=1e9)]
"""Seconds, as ranks report them; bounded, so that sums and quotients (by numbers other than 0) are finite."""
Speed = Annotated[float, Field(strict=True, ge=0, le=1e18)]
"""Bytes or parameters per second."""
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Sum = Annotated[int, Field(strict=True, ge=0)]
"""A sum of counts over many ranks, without an upper bound."""
DurationBy = Annotated[dict[Label, Duration], Field(max_length=128)]
CountBy = Annotated[dict[Label, Count], Field(max_length=128)]
SumBy = dict[Label, Sum]

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
AgentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Id of an agent. It is a segment of URLs, so it has no `/`, and is neither `.` nor `..`."""
Rank = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
# The validator checks the bound, with a better message than a bound of the field.
PathName = Annotated[str, AfterValidator(check_path_name), WithJsonSchema({"type": "string", "maxLength": 32})]
DeviceKind = Literal["cuda", "emulated"]
Liveness = Literal["live", "stale", "lost", "failed", "finished"]
ErrorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{0,64}$")]
"""Name of the type of an exception; empty for none."""
KnobText = Annotated[str, Field(max_length=4096)]
"""A knob's value as text. The limit is enough for a `tier_split` of 64 paths with names of 32 characters."""
KnobChanges = Annotated[dict[Key, Value | Whole | KnobText], Field(max_length=128)]


class Message(BaseModel):
    """Base of all messages: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
