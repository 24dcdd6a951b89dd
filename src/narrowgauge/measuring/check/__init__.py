"""What ``ng.check`` asks before a run: the set-up, the update that will be stored, roundings, slope."""
