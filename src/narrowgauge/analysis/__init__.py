"""Columns of a run's record, and the thresholds of comparisons."""
