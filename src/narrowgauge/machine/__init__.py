"""This machine: its processor, C++ compiler, cache folder and child processes. Nothing here loads PyTorch."""
