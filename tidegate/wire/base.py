"""What all messages of the wire are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tidegate.knobs import check_path_name

Label = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=2000)]
# Strict: "5" is no number, false no zero, 1 no truth. Whoever sends such has a mistake that should be told.
Number = Annotated[float, Field(strict=True)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
SecondsBy = Annotated[dict[Label, Seconds], Field(max_length=128)]
CountBy = Annotated[dict[Label, Count], Field(max_length=128)]

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rank = Annotated[int, Field(strict=True, ge=0, lt=1_000_000)]
PathName = Annotated[str, AfterValidator(check_path_name)]
DeviceKind = Literal["cuda", "emulated"]
Liveness = Literal["live", "stale", "lost", "finished"]
KnobChanges = dict[str, Finite | Annotated[int, Field(strict=True)] | str]


class Message(BaseModel):
    """Base of all messages: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
