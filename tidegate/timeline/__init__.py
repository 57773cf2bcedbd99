"""What happened in one step: its record, spans on lanes, stall analysis, verdict, and the Chrome trace."""
