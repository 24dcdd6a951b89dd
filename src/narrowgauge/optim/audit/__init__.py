"""Measure in a run which part of each update is stored."""
