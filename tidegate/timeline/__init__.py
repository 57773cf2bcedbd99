"""Timelines of one step: spans on lanes, stall analysis, verdict, and the Chrome trace."""
