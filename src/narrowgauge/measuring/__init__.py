"""Measure a training: before it runs, while it runs, and from its record.

Every result is a :class:`~narrowgauge.measuring.reading.Reading`: a number, what it should be, and
the bound of the difference. ``reading``, ``kinds``, ``step``, ``laws`` and ``diagnose`` need no
PyTorch.
"""
