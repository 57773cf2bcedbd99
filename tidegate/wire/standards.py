"""Messages in formats that standards define: HTTP problem details (RFC 9457), and Prometheus service discovery."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tidegate.wire.base import Message


class Problem(BaseModel):
    """Error response (RFC 9457 problem details); it may also have `knob`, `rank` or `bounds`."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class SdTarget(Message):
    """One entry of Prometheus HTTP service discovery."""

    targets: tuple[str, ...]
    labels: dict[str, str]
