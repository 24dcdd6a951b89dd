"""Eyes: gauges that watch a training step, and the search for its first bad value."""
