"""Figures of a page, as plain data for Plotly."""
