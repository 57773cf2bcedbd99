"""Makes docs/images/knob.gif: the live view of a demo while an operator changes a knob.

    .venv/bin/python docs/animate_knob.py

It starts `tidegate demo` on the emulated device, opens the live view in Chromium, takes a picture each second, sets
`stride=off`, and later `stride=2` again. It takes about two minutes.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.dashboard.browser import chromium, open_page  # noqa: E402
from tests.demo.test_demo import Demo  # noqa: E402
from tests.services import free_port, until  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "knob.gif"
HEIGHT, WIDTH = 720, 860
"""Height of the browser's window, and width of the picture, in pixels. The window is 1280 wide."""
FRAMES, FRAME_MS, LAST_MS = 40, 500, 3000
CHANGES = {8: ("stride=off",), 24: ("stride=2",)}
"""Knobs that are set before a frame, by the frame's number."""
COLOURS = 64
WARM_UP_SECONDS = 15
"""Time in which the page collects steps, before the first picture."""


def frames(demo: Demo) -> list[Image.Image]:
    """Pictures of the page of the run, one a second, while the knobs are changed."""
    token = (demo.folder / "state" / "read.token").read_text().strip()
    taken: list[Image.Image] = []
    view = demo.address("live view").rstrip("/") + "/run"
    with chromium() as browser, open_page(browser, view, height=HEIGHT, token=token) as (page, _):
        for number in range(FRAMES):
            due = time.monotonic() + 1.0
            if number in CHANGES:
                demo.tidegate("knobs", "set", *CHANGES[number])
            taken.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
            time.sleep(max(0.0, due - time.monotonic()))
    return taken


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
        demo = Demo(Path(folder), ["demo", "--steps", "100000", "--run", "llama", "--stride", "2", *ports])
        try:
            until(lambda: "  step 1/" in demo.said, "the first step", 120)
            time.sleep(WARM_UP_SECONDS)
            taken = frames(demo)
        finally:
            demo.process.terminate()
            try:
                demo.wait(60)
            except subprocess.TimeoutExpired:
                demo.process.kill()
    small = [one.resize((WIDTH, round(WIDTH * one.height / one.width)), Image.Resampling.LANCZOS) for one in taken]
    palette = small[-1].quantize(COLOURS)
    drawn = [one.quantize(COLOURS, palette=palette, dither=Image.Dither.NONE) for one in small]
    durations = [FRAME_MS] * (len(drawn) - 1) + [LAST_MS]
    drawn[0].save(PICTURE, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True)
    print(f"{PICTURE}: {len(drawn)} frames, {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
