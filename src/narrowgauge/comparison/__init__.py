"""Runs beside each other: trials, intervals, a verdict in words, and where all of it is published."""
