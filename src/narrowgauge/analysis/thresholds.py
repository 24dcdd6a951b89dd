"""Thresholds of the watch, the recorder and the comparisons, one a line: name,
value, unit, reason.

The bound of each kind of reading is in ``data/kinds.toml``.
"""

# ── the watch and the recorder ────────────────────────────────────────────────────────────────────
SETTLED = 50  # steps: only then is a tensor without a gradient or without a change reported
UNIFORM_STEPS = 20  # steps, and half of all: a loss that passes ln V stays near it for fewer
LEAST_SHARE_OF_STEPS = 0.05  # fraction: of the steps without a gradient, before they are a reading
ROUNDINGS = 4  # ulps: largest change of a frozen tensor that rounding explains
EVALUATIONS_APART = 4  # steps for each evaluation: a loop with passes in training mode in more of its steps means them
MOST_PROBES = 8  # optimizers: of more, as of one for each tensor, only one is looked at for gradients that were kept
UNSTEPPED = 20  # backward passes before the first step, while another optimizer steps
LOSS_APART = 1.0  # nats: a rank's loss above twice the median and this, since small losses differ by large factors
LEAST_PROBE = 8  # elements: gradients of fewer are equal by chance
FEWEST_SAMPLES = (
    5  # sampled steps: only then are equal passes, and rates unlike those at the start, a reading
)
TWICE = 2.0  # factor: a fault is told again when it is this many times as far beyond its bound
REPEATED = 0.01  # share of the intended change: largest distance between a step and its copy in the stored formats

# ── spikes ────────────────────────────────────────────────────────────────────────────────────────
WINDOW, RECENT = 100, 30  # steps: for the estimate of the noise, and for the level
FEWEST = 20  # steps: before any spike
Z = 8.0  # robust standard deviations above the level; healthy calibration runs reach 5 for the loss
LOSS_FLOOR = 0.01  # fraction of the median, and nats: least standard deviation of the loss
NORM_FACTOR = (
    10.0  # factor over the median: least spike of the gradient norm; healthy runs reach 6.6
)
PATIENCE = 50  # spikes in a row: they become the new level

# ── the first difference of two runs ──────────────────────────────────────────────────────────────
ENVELOPE = (
    32.0  # multiples of a norm's expected rounding error: rounding errors are not independent
)
LEAST = (
    2.0**-20
)  # relative: 8 ulps of float32; another order of a float32 model's sums moved norms by up to 1.4e-7
GROWTH = 30.0  # factor a step: of the largest difference; measured on tiny models: below 6

# ── the comparison and the diagnosis of runs ──────────────────────────────────────────────────────
NEGLIGIBLE = 1e-3  # fraction of the baseline's loss: a difference whose whole interval lies within does not matter
ACCEPTABLE = 0.01  # fraction of the baseline's loss: a certain increase up to this is a price, a larger one a fault
MAX_SKIPPED = (
    0.05  # fraction of steps: more skipped ones are a fault; a loss scale settles within fewer
)
NOISE = 4.0  # median distances from the median of the first quarter: a smaller rise is noise
MAX_LOSS_RISE = 0.2  # fraction of the first loss: a run that ends higher has diverged
FEWEST_STEPS = 50  # losses: only then is a flat one a reading
FEWEST_BATCHES = (
    5  # rows in a row: fewer repeated batches, or steps at a rate of zero, are no reading
)
LEAST_LOSS = 0.05  # nats: losses that begin lower, or pass zero, have no size of their own
MOST_STATES = 100_000  # of a generator that are remembered, in about 15 MB
