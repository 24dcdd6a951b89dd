"""Measure what recipes cost a model on this machine: ``measurement`` times layers and steps,
``profile`` compares and prints.
"""
