"""Policies of :mod:`narrowgauge.measuring.check.dispatch`, which see each operation of a step:
``float64_shadow`` repeats it without roundings, ``first_nonfinite`` finds where infinity and NaN begin.
"""
