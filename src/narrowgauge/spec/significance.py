"""Student's t, and where updates count as lost: shared by the comparison of seeds and the
audit of steps.
"""

MIN_EDQ = 0.9
"""A storage with a lower effective descent quality loses its updates."""


_QUANTILES = {
    0.9: (
        6.313752, 2.919986, 2.353363, 2.131847, 2.015048, 1.943180, 1.894579, 1.859548, 1.833113, 1.812461,
        1.795885, 1.782288, 1.770933, 1.761310, 1.753050, 1.745884, 1.739607, 1.734064, 1.729133, 1.724718,
    ),
    0.95: (
        12.70620, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
        2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    ),
    0.9998: (
        3183.099, 70.70007, 22.20374, 13.03367, 9.677566, 8.024793, 7.063433, 6.442000, 6.010132, 5.693820,
        5.452762, 5.263273, 5.110579, 4.985013, 4.879998, 4.790910, 4.714407, 4.648014, 4.589865, 4.538521,
    ),
}  # fmt: skip


def student_t(degrees: int, confidence: float = 0.95) -> float:
    """Return the two-sided quantile of Student's t for 1 to 20 ``degrees`` of freedom: a sample lies
    within ± this many standard errors with a probability of 0.9, 0.95 or 0.9998. More degrees have
    the quantile of 20, which is at most 6 % wider at 0.95.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    quantiles = _QUANTILES[confidence]
    return quantiles[min(degrees, len(quantiles)) - 1]
