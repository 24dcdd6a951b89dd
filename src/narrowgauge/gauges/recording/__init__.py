"""The record of a run in any loop: the row of each step, its fingerprints, and their destinations."""
