"""Measure what recipes cost a model on this machine, layer by layer.

``layers`` lists the linear layers and how a recipe computes each, ``measurement`` times their operations and whole steps,
``cast_error`` measures what the casts lose, and ``profile`` compares and prints.
"""
