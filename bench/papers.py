"""Claim: Tidegate's model reproduces the measurements of two papers, from one rate card for each of their machines.

Each row compares a figure of the papers that a simulator can predict (`published/reported.json`, with its place in the
paper) with the result of Tidegate's planner and simulator for the same machine and system. The rate cards
(`published/cards.py`) come from the papers' tables and text. Nothing is fitted to results, so that all rows can be
scored. The error of a row is |ours - reported| / reported, or 1 if the model has no answer. A range in the paper gives
two rows: its smallest value (`least`) and its largest (`most`). `assumes`: assumptions of a row in addition to the rate
card.
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
"""Ids of rows to which a rate card was fitted: they would be listed without a score. There are none."""


def scored(row: dict[str, Any], ours: Ours) -> dict[str, Any]:
    """The row of the table for one figure of a paper: the reported figure (`row`), the model's figure, its error, and
    whether the row counts in the statistics of errors (`scored`)."""
    error = 1.0 if ours.value is None else abs(ours.value - row["reported"]) / abs(row["reported"])
    return {
        **row,
        "ours": None if ours.value is None else float(f"{ours.value:.4g}"),
        "error": round(error, 4),
        "scored": row["id"] not in CALIBRATION_ROWS,
        "assumes": ours.assumes,
    }


def report(cards: Cards) -> dict[str, Any]:
    """All rows, and statistics of their errors. Equal on every run, except for `seconds`."""
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
    """The rows as a Markdown table, for the documentation."""
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
