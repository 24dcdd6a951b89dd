"""The command line: commands and their flags. No decision is made here, and PyTorch is loaded only where a command needs it."""
