"""Measure what recipes cost a model on this machine: ``measurement`` times steps, ``profile``
compares and prints.
"""
