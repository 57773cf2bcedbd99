"""Messages in formats that standards define: HTTP problem details (RFC 9457), and Prometheus service discovery."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tidegate.wire.base import Message


class Problem(BaseModel):
    """RFC 9457 problem details; `knob`, `rank` and `bounds` where they apply."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class SdTarget(Message):
    """One entry of Prometheus HTTP service discovery."""

    targets: tuple[str, ...]
    labels: dict[str, str]
