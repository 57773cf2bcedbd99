"""Runbooks as they are followed: the commands of a page, word by word."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
HEADINGS = ("What it means", "What to look at", "What to do", "How to know that it is fixed")
PLACEHOLDERS = {
    "RUN", "CAUSE", "PATH_NAME", "OTHER_PATH", "DIRECTORY", "STATE_DIR", "PORT", "TRAINING_COMMAND", "PID", "JOB",
    "ADDRESS",
}  # fmt: skip
"""What a reader puts in: words of capitals in the commands."""


def section(page: str, heading: str) -> str:
    """What stands under a heading of any level, up to the next of the same or a higher one."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", page, re.MULTILINE)
    if found is None:
        raise KeyError(f"there is no heading {heading!r}")
    rest = page[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def commands(alert: str, heading: str = "What to do") -> list[str]:
    """The blocks of commands under a heading of an alert's page."""
    page = (RUNBOOKS / f"{alert}.md").read_text()
    return re.findall(r"^```bash\n(.*?)^```$", section(page, heading), re.MULTILINE | re.DOTALL)


def filled(command: str, values: Mapping[str, str]) -> str:
    """The command with the reader's values. KeyError for a placeholder that has none."""
    return re.sub(r"\b(" + "|".join(sorted(PLACEHOLDERS)) + r")\b", lambda m: values[m[1]], command)


def follow(
    alert: str, heading: str, values: Mapping[str, str], env: Mapping[str, str], folder: Path, seconds: float = 60.0
) -> list[str]:
    """Does what the page says under a heading, a shell for each block; AssertionError when a command fails. The
    commands as they were run."""
    done = []
    for block in commands(alert, heading):
        text = filled(block, values)
        log = folder / f"{alert}.log"
        # To a file: what a block leaves running in the background would hold a pipe open.
        with log.open("a") as out:
            code = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=dict(env), stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, timeout=seconds, check=False,
            ).returncode  # fmt: skip
        assert code == 0, f"{text}\nended with {code}:\n{log.read_text()}"
        done += [line for line in text.splitlines() if line.strip()]
    assert done, f"{alert}.md has no commands under {heading!r}"
    return done
