"""Measure what number formats do to training: before it, during it, and between two runs or models."""
