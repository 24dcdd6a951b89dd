"""Arithmetic: tensors in, tensors out. No modules, no processes, no state."""
