"""Fixed colours of phases, lanes and kinds of ops, from the Okabe-Ito set: colour-blind people can tell them apart."""

from __future__ import annotations

from typing import Final, Literal

Theme = Literal["light", "dark"]
GREY: Final = "#8C8C8C"

INK: Final[dict[Theme, str]] = {"light": "#1A1A1A", "dark": "#FAFAFA"}
"""Colour of text and lines that must be visible on every other colour."""

LABEL: Final[dict[Theme, str]] = {"light": "#5B6170", "dark": "#B4B8C2"}
"""Colour of small text in charts, with a contrast of at least 5 to 1."""

GRID: Final[dict[Theme, str]] = {"light": "#E4E4E2", "dark": "#353431"}

GROUND: Final[dict[Theme, str]] = {"light": "#FFFFFF", "dark": "#171614"}
"""Background colour: that of Streamlit."""

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
"""Colours of the kinds of ops: shades of their lane's colour."""

HOST: Final = {"state": "#009E73", "mirror": "#66C5A8", "gradient": "#00573F", "slot": "#B3E0D1"}
"""Colours of the kinds of host memory (mirror: copies of weights; slot: staging buffers): shades of the CPU lane's
colour."""

CAUSE: Final = {**LANE, "lock": "#F0E442", "collective": "#0072B2", "dispatch": GREY}

LIVENESS: Final = {"live": "#009E73", "stale": "#E69F00", "lost": "#D55E00", "failed": "#D55E00", "finished": GREY}

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
    """The colour of a lane. The read lane of a storage path has the colour of fetch ops, its write lane that of flush
    ops."""
    return LANE.get(name) or {"read": KIND["fetch"], "write": KIND["flush"]}.get(name.rpartition(":")[2], GREY)


def cause(name: str) -> str:
    """The colour of a stall cause."""
    return CAUSE.get(name) or lane(name)


def residence(name: str) -> str:
    """The colour of a residence of state: device memory, host memory, or a storage path."""
    return {"device": LANE["device"], "host": LANE["cpu"], "cpu": LANE["cpu"]}.get(name, KIND["fetch"])
