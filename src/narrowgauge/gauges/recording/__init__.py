"""The record of a run, whoever runs the loop: the row of each step, its fingerprints, and where they go."""
