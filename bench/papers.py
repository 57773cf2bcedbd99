"""Claim: the model reproduces what two papers measured, from one rate card for each of their machines.

Every figure of theirs that a simulator can be checked against (`published/reported.json`, with where it stands) beside
what our planner and simulator say when told the machine and the system. The rate cards (`published/cards.py`) come
from the papers' tables and text; nothing is fitted, neither to a row nor over rows, so that no row is used up by
calibration. A row's error is |ours - reported| / reported, never above what it is; a row that the model cannot answer
counts as 1. `least` and `most` of a range are two rows. `assumes` says what a row needs beside the rate card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from published import dos, mlp
from published.cards import Cards, variants
from published.rows import Ours

REPORTED = Path(__file__).parent / "published" / "reported.json"
CALIBRATION_ROWS: tuple[str, ...] = ()
"""Rows that a rate card was fitted to: they would be listed, and not scored. There are none."""


def scored(row: dict[str, Any], ours: Ours) -> dict[str, Any]:
    """The row with our figure, its error, and whether it counts."""
    error = 1.0 if ours.value is None else abs(ours.value - row["reported"]) / abs(row["reported"])
    return {
        **row,
        "ours": None if ours.value is None else float(f"{ours.value:.4g}"),
        "error": round(error, 4),
        "scored": row["id"] not in CALIBRATION_ROWS,
        "assumes": ours.assumes,
    }


def report(cards: Cards) -> dict[str, Any]:
    """All rows, and how far they are off. The same at every run, but for `seconds`."""
    began = time.perf_counter()
    ours = dict([*dos.answers(cards), *mlp.answers(cards)])
    rows = [scored(row, ours[row["id"]]) for row in json.loads(REPORTED.read_text())["rows"]]
    errors = sorted(row["error"] for row in rows if row["scored"])
    by_paper = {
        paper: statistics.median(row["error"] for row in rows if row["scored"] and row["where"].startswith(paper))
        for paper in ("DOS", "MLP")
    }
    return {
        "rows": rows,
        "calibration_rows": list(CALIBRATION_ROWS),
        "scored_rows": len(errors),
        "median_abs_error": round(statistics.median(errors), 4),
        "median_abs_error_by_paper": {paper: round(error, 4) for paper, error in by_paper.items()},
        "mean_abs_error": round(statistics.mean(errors), 4),
        "p90_abs_error": errors[int(0.9 * (len(errors) - 1))],
        "largest_abs_error": errors[-1],
        "rows_within_20_percent": sum(error <= 0.2 for error in errors),
        "seconds": round(time.perf_counter() - began, 2),
    }


def table(found: dict[str, Any]) -> str:
    """As Markdown, for the documentation."""
    lines = ["| where | model | what | reported | ours | error |", "| --- | --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        ours = "none" if row["ours"] is None else f"{row['ours']:.3g}"
        lines.append(
            f"| {row['where']} | {row.get('model', '')} | {row['what']} | {row['reported']:g} {row['unit']} | {ours} | "
            f"{row['error']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--variants", action="store_true", help="again with one assumption changed at a time")
    arguments = parser.parse_args()
    found = report(Cards())
    if arguments.variants:
        found["median_abs_error_of_variants"] = {
            name: report(cards)["median_abs_error"] for name, cards in variants().items()
        }
    if arguments.json:
        print(json.dumps(found))
        return
    print(table(found))
    print(
        f"\nmedian error {found['median_abs_error']:.1%} over {found['scored_rows']} rows, "
        f"{found['rows_within_20_percent']} of them within 20 %, largest {found['largest_abs_error']:.0%}; "
        f"{found['seconds']} s"
    )
    for name, error in found.get("median_abs_error_of_variants", {}).items():
        print(f"  {name}: {error:.1%}")


if __name__ == "__main__":
    main()
