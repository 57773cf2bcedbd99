"""One fixed colour for each phase, lane and kind of op (Okabe and Ito's set): told apart by colour-blind people too."""

from __future__ import annotations

from typing import Final, Literal

Theme = Literal["light", "dark"]
GREY: Final = "#8C8C8C"

INK: Final[dict[Theme, str]] = {"light": "#1A1A1A", "dark": "#FAFAFA"}
"""What must be seen on every colour."""

LABEL: Final[dict[Theme, str]] = {"light": "#5B6170", "dark": "#B4B8C2"}
"""The small words of charts: a contrast of 5 to 1 or more."""

GRID: Final[dict[Theme, str]] = {"light": "#E4E4E2", "dark": "#353431"}

GROUND: Final[dict[Theme, str]] = {"light": "#FFFFFF", "dark": "#171614"}
"""Behind everything: Streamlit's own."""

PHASE: Final = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "update": "#E69F00",
    "checkpoint": "#F0E442",
    "other": GREY,
}

LANE: Final = {"h2d": "#D55E00", "d2h": "#CC79A7", "cpu": "#009E73", "device": "#56B4E9"}

KIND: Final = {
    "state_h2d": "#D55E00",
    "weight_h2d": "#F0A878",
    "state_d2h": "#CC79A7",
    "weight_d2h": "#E8C2D6",
    "grad_d2h": "#8E4F73",
    "grad_h2d": "#8F3F00",
    "grad_norm": "#A9DDF5",
    "cpu_update": "#009E73",
    "device_update": "#56B4E9",
    "norm": "#0072B2",
    "fetch": "#E69F00",
    "flush": "#B87F00",
}
"""Kinds are shades of their lane's colour."""

HOST: Final = {"state": "#009E73", "mirror": "#66C5A8", "gradient": "#00573F", "slot": "#B3E0D1"}
"""Kinds of host memory are shades of the colour of what the CPU updates."""

CAUSE: Final = {**LANE, "lock": "#F0E442", "collective": "#0072B2", "scheduler": GREY}

LIVENESS: Final = {"live": "#009E73", "stale": "#E69F00", "lost": "#D55E00", "finished": GREY}

KIND_NAME: Final = {
    "state_h2d": "state in",
    "weight_h2d": "weight in",
    "state_d2h": "state out",
    "weight_d2h": "weight out",
    "grad_d2h": "gradient out",
    "grad_h2d": "gradient in",
    "grad_norm": "squares",
    "cpu_update": "CPU update",
    "device_update": "device update",
    "norm": "norm",
    "fetch": "fetch",
    "flush": "flush",
}


def lane(name: str) -> str:
    """The colour of a lane; those of paths have that of their ops."""
    return LANE.get(name) or {"read": KIND["fetch"], "write": KIND["flush"]}.get(name.rpartition(":")[2], GREY)


def cause(name: str) -> str:
    """The colour of what a step waited for."""
    return CAUSE.get(name) or lane(name)


def place(residence: str) -> str:
    """The colour of where state lives: device memory, host memory, or a path."""
    return {"device": LANE["device"], "host": LANE["cpu"], "cpu": LANE["cpu"]}.get(residence, KIND["fetch"])
