"""Steps of a run, computed again from its folder: what a record does not hold, and what another arithmetic would have given."""
