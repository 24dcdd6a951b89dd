"""Measure what number formats do to training: before it, during it, and between two runs or models.

Every result is a :class:`~narrowgauge.measuring.reading.Reading`: a number, what it should be, and the
bound of the difference. ``reading``, ``kinds`` and ``diagnose`` need no PyTorch.
"""
