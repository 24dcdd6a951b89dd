"""``narrowgauge.check``: what is wrong in a training loop, found before it runs or while it takes a few steps."""
