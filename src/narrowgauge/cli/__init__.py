"""The command line: commands and their flags.

Decides nothing, and loads PyTorch only in commands that need it.
"""
