"""Checkpoints of runs, in PyTorch's distributed format with a manifest of checksums; Adam states of
other libraries.
"""
