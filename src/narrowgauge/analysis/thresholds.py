"""Thresholds of the comparisons, one a line: name, value, unit, reason.

The bound of each kind of reading is in ``data/kinds.toml``.
"""

# ── the first difference of two runs ──────────────────────────────────────────────────────────────
ENVELOPE = (
    32.0  # multiples of a norm's expected rounding error: rounding errors are not independent
)
LEAST = (
    2.0**-20
)  # relative: 8 ulps of float32; another order of a float32 model's sums moved norms by up to 1.4e-7
GROWTH = 30.0  # factor a step: of the largest difference; measured on tiny models: below 6

# ── the comparison of runs ──────────────────────────────────────────────────────
NEGLIGIBLE = 1e-3  # fraction of the baseline's loss: a difference whose whole interval lies within does not matter
ACCEPTABLE = 0.01  # fraction of the baseline's loss: a certain increase up to this is a price, a larger one a fault
MAX_SKIPPED = (
    0.05  # fraction of steps: more skipped ones are a fault; a loss scale settles within fewer
)
NOISE = 4.0  # median distances from the median of the first quarter: a smaller rise is noise
MAX_LOSS_RISE = 0.2  # fraction of the first loss: a run that ends higher has diverged
LEAST_LOSS = 0.05  # nats: losses that begin lower, or pass zero, have no size of their own
