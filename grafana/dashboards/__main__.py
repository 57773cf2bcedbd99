"""Command that writes the dashboards' JSON files. With --check, it only names the files that differ from the code's
output."""

from __future__ import annotations

import sys

from tidegate.grafana.dashboards import rendered


def main(arguments: list[str]) -> int:
    """Runs the command with these arguments, and returns the exit status: 1 if --check finds a stale file, 2 for other
    arguments."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m tidegate.grafana.dashboards [--check]", file=sys.stderr)
        return 2
    stale = [path for path, text in rendered().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        if arguments:
            print(f"{path} is not what the code makes: run python -m tidegate.grafana.dashboards.", file=sys.stderr)
        else:
            path.write_text(rendered()[path])
            print(f"wrote {path}")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
