"""Detectors that read the rows of a run and raise events."""
