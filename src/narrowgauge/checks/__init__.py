"""Checks before training: updates lost to rounding, wrong gradients, and resumes that change the
run.
"""
