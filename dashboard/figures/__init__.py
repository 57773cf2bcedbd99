"""Figures: builds charts as Plotly figures."""
