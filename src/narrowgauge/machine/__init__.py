"""This machine: its processor, compiler, cache and processes, which need no PyTorch, and its arithmetic measured."""
