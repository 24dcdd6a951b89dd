"""Diagnosis: from the record of a run to the cause of what went wrong, with its evidence; needs no PyTorch."""
