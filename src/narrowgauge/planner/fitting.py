"""Fitting shares: which shares of its rates make a machine as fast as it was seen to be.

A share enters a predicted time through quotients and maxima, so the fit is a sequence of linear ones (Gauss–Newton, with steps
halved where they overshoot). Unknowns are logarithms, since a share is positive and errors are relative. Every share has a prior:
the published one with its interval, or next to nothing on a machine of which nothing is published. So a share that no observation
depends on keeps its published value, and fewer observations than unknowns are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.planner.linear_equations import solve
from narrowgauge.planner.shares import Share, Shares

NOISE = 0.02
"""Relative error of a measured time, at least."""
SIGMAS = 1.2816
"""Standard deviations of the interval in which a value lies four times out of five."""
_ROUNDS = 30
_STEP = 1e-3  # of a logarithm, for derivatives
_LARGEST_MOVE = 1.0  # of a logarithm, in one round
_STILL = 1e-2  # of a logarithm: a fit that moves less has ended
_LARGEST_SPREAD = 0.1  # of the errors, as a weight against priors
_OUTLIER = 2.5  # standard deviations from which an observation counts less


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time, and how the planner predicts it.

    Args:
        name: of the run or operation.
        seconds: measured.
        predict: the predicted seconds with given shares.
    """

    name: str
    seconds: float
    predict: Callable[[Shares], float]

    def log_error(self, shares: Shares) -> float:
        """The logarithm of predicted over measured."""
        return math.log(self.predict(shares) / self.seconds)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted shares.

    Args:
        shares: those given, with the fitted ones in place of some.
        names: of the fitted ones that the observations depend on.
        error: root mean square of the relative errors that are left.
        worst: the observation with the largest one, and that error.
    """

    shares: Shares
    names: tuple[str, ...]
    error: float
    worst: tuple[str, float]


def fit_shares(
    observations: Sequence[Observation], shares: Shares, deviations: Mapping[str, float], source: str
) -> Fit:
    """Fit shares to observations.

    Args:
        observations: one or more.
        shares: the priors' values; those without a deviation stay.
        deviations: standard deviation of the logarithm of each share that may move.
        source: what the fitted shares say of themselves.
    Returns:
        The shares, with intervals that hold what the fit left over as well as what it could not determine.
    """
    found = _Descent(observations, shares, deviations)
    for _ in range(_ROUNDS):
        if not found.move():
            break
    return found.fit(source)


class _Descent:
    """The state of a fit: logarithms of shares, relative to their priors."""

    def __init__(self, observations: Sequence[Observation], shares: Shares, deviations: Mapping[str, float]) -> None:
        self.observations, self.shares, self.deviations = observations, shares, dict(deviations)
        self.names = [name for name in deviations if self._matters(name)]
        self.logs = dict.fromkeys(self.names, 0.0)
        self.errors = self._errors(self.logs)

    def _matters(self, name: str) -> bool:
        moved = self._with({name: _STEP})
        return any(abs(o.log_error(moved) - o.log_error(self.shares)) > 1e-3 * _STEP for o in self.observations)

    def _with(self, logs: Mapping[str, float]) -> Shares:
        rows = {}
        for name, log in logs.items():
            value = self.shares[name].value * math.exp(log)
            rows[name] = Share(value, value, value, "")
        return self.shares.replaced(rows)

    def _errors(self, logs: Mapping[str, float]) -> list[float]:
        shares = self._with(logs)
        return [observation.log_error(shares) for observation in self.observations]

    @property
    def spread(self) -> float:
        """A robust standard deviation of the errors: an observation that went wrong must not widen it."""
        ordered = sorted(map(abs, self.errors))
        return max(NOISE, 1.4826 * ordered[len(ordered) // 2])

    def _weights(self) -> list[float]:
        """Of each observation: one over its variance, less where it lies far off (Huber)."""
        # Far from the solution all errors are large; they must not make the priors seem certain.
        sigma, far = min(self.spread, _LARGEST_SPREAD), _OUTLIER * self.spread
        return [min(1.0, far / max(abs(e), 1e-12)) / sigma**2 for e in self.errors]

    def _cost(self, logs: Mapping[str, float], errors: Sequence[float], weights: Sequence[float]) -> float:
        priors = sum((log / self.deviations[name]) ** 2 for name, log in logs.items())
        return priors + sum(w * e * e for w, e in zip(weights, errors, strict=True))

    def _equations(self, weights: Sequence[float]) -> tuple[list[list[float]], list[list[float]]]:
        columns = []
        for name in self.names:
            moved = self._errors({**self.logs, name: self.logs[name] + _STEP})
            columns.append([(m - e) / _STEP for m, e in zip(moved, self.errors, strict=True)])

        def product(a: Sequence[float], b: Sequence[float]) -> float:
            return sum(w * x * y for w, x, y in zip(weights, a, b, strict=True))

        priors = [1 / self.deviations[name] ** 2 for name in self.names]
        matrix = [
            [product(a, b) + (priors[i] if i == j else 0.0) for j, b in enumerate(columns)]
            for i, a in enumerate(columns)
        ]
        sides = [
            [-product(column, self.errors) - priors[i] * self.logs[self.names[i]]] for i, column in enumerate(columns)
        ]
        return matrix, sides

    def move(self) -> bool:
        """One round; whether it moved enough for another."""
        if not self.names:
            return False
        weights = self._weights()
        moves = solve(*self._equations(weights))
        if moves is None:
            return False
        before = self._cost(self.logs, self.errors, weights)
        largest = max(abs(move[0]) for move in moves)
        factor = min(1.0, _LARGEST_MOVE / largest) if largest else 0.0
        while factor > 1e-3:
            logs = {name: self.logs[name] + factor * move[0] for name, move in zip(self.names, moves, strict=True)}
            errors = self._errors(logs)
            if self._cost(logs, errors, weights) < before:
                self.logs, self.errors = logs, errors
                return factor * largest > _STILL
            factor /= 2
        return False

    def fit(self, source: str) -> Fit:
        """The fitted shares with their intervals."""
        matrix = self._equations(self._weights())[0]
        rows = {}
        for k, name in enumerate(self.names):
            value = self.shares[name].value * math.exp(self.logs[name])
            # Sums of terms add the ends of all shares, as if these were wrong in one direction. What a fit leaves open is not:
            # where one share is too high another one is too low. So each gets the deviation that it has while the others stay,
            # and what the fit leaves over, which is in every prediction.
            wide = math.exp(SIGMAS * math.sqrt(1 / matrix[k][k] + self.spread**2))
            rows[name] = Share(value, value / wide, value * wide, source)
        relative = [math.exp(e) - 1 for e in self.errors]
        worst = max(range(len(relative)), key=lambda k: abs(relative[k]))
        error = math.sqrt(sum(r * r for r in relative) / len(relative))
        return Fit(
            self.shares.replaced(rows), tuple(self.names), error, (self.observations[worst].name, relative[worst])
        )
