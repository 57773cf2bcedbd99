"""Figures: charts as Plotly takes them."""
