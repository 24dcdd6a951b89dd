"""What a run watches itself for: detectors that read its rows, and the judge of spikes."""
