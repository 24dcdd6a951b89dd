"""What rows of a record say: laws over steps, and the first difference of two runs. No PyTorch."""
