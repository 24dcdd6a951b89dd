"""Calibration: the shares of its rates that a machine reaches, from runs and profiles on it.

Published shares are those of other people's machines. The steps of a few runs here, which differ in model, recipe or batch, say
what this one reaches, and an interval says how well they agree. The result is kept in the cache folder by name: ``here`` for this
machine, or the name of a chip in the table. It is used where it is asked for, and a plan that uses it says so.

A processor has no row in the table of chips. ``here`` then has nominal rates of its instruction set, and the shares say the rest.

A share enters a predicted time through quotients and maxima, so the fit is a sequence of linear ones (Gauss–Newton, with steps
halved where they overshoot). Unknowns are logarithms, since a share is positive and errors are relative. Every share has a prior:
the published one with its interval, or next to nothing on a machine of which nothing is published. So a share that no observation
depends on keeps its published value, and fewer observations than unknowns are enough.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.planner.inputs.clusters import HERE
from narrowgauge.planner.inputs.efficiency import Share, Shares, shares_of
from narrowgauge.planner.measured.launches import LaunchedJob, planned_step, read_launch
from narrowgauge.planner.measured.least_squares import NOISE, SIGMAS, solve
from narrowgauge.planner.time.roofline import Setting, Shape, operation_seconds, setting_of
from narrowgauge.runs.atomic_io import write_whole
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.notation import parse_value

_VERSION = 1
_UNKNOWN, _DERIVED = 1.5, 0.7
"""Standard deviation of the logarithm of a share of nominal rates: a factor of 4.5 either way for matmuls, memory and links, of 2
for the others, which are relative to these."""
_ALIKE = ("attention", "elementwise", "casts", "loss", "optimizer")
_POOR = 0.25
_LEAST = 0.1  # of a share that is published without an interval, or with a narrower one
# What a step of a run depends on, besides ``matmul.FORMAT``; the others are published or assumed.
_FITTED = ("bandwidth", "elementwise", "casts", "loss", "optimizer", "attention", "kernel_seconds", "link")
# Float32 operations per cycle of one core, at the nominal clock; two fused multiply-adds on vectors of that many lanes.
_NOMINAL = {"AVX512": 64, "AVX2": 32, "DEFAULT": 8}
_CLOCK_HZ = 2.5e9
_BANDWIDTH_GB_PER_SECOND = 10.0  # of one core
_LINK_GB_PER_SECOND = 1.0  # between processes of a host


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of a machine, fitted ones among published ones.

    Args:
        name: ``here``, or a chip's.
        fitted: names of the fitted ones.
        error: root mean square of the relative errors of the observations.
        worst: the observation with the largest one, and that error.
    """

    name: str
    chip: Chip
    shares: Shares
    fitted: tuple[str, ...]
    error: float
    worst: tuple[str, float]
    sources: tuple[str, ...]


def calibrate(sources: Sequence[str | Path], chip: Chip | None = None) -> Calibration:
    """Fit the shares of a machine to run folders and files of ``narrowgauge profile --json``; ``chip`` None is this machine."""
    paths = [Path(source).expanduser() for source in sources]
    found = chip or _chip_of(paths)
    observations = [each for path in paths for each in _observations(path, found)]
    priors = priors_of(found)
    names = f"fitted to {len(observations)} times of {', '.join(path.name for path in paths[:3])}"
    names += f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    fit = fit_shares(observations, priors, deviations(priors, found), names)
    return _calibration(HERE if chip is None else found.name, found, fit, [str(path.resolve()) for path in paths])


def _calibration(name: str, chip: Chip, fit: Fit, sources: Sequence[str]) -> Calibration:
    return Calibration(name, chip, fit.shares, fit.names, fit.error, fit.worst, tuple(sources))


def priors_of(chip: Chip) -> Shares:
    """The shares of a chip before anything is measured: the published ones.

    A processor computes, sends and calls kernels with the same cores, so none of these hides another and nothing waits between
    them.
    """
    if chip.vendor != "CPU":
        return shares_of(chip)
    why = "the same cores compute, send and call kernels"
    return shares_of(chip).replaced(
        {
            "overlap.shard": Share(0.0, 0.0, 0.0, why),
            "library": Share(1.0, 1.0, 1.0, why),
            "slowed.link": Share(0.0, 0.0, 0.0, why),
        }
    )


def deviations(shares: Shares, chip: Chip) -> dict[str, float]:
    """The standard deviation of the logarithm of each share that a fit may move; wide for a chip outside the table."""
    names = [name for name in shares.rows if name.startswith("matmul.") or name in _FITTED]
    if chip.name not in CHIPS:
        known = {**dict.fromkeys(_ALIKE, _DERIVED), "kernel_seconds": 2 * _UNKNOWN}
        return {name: known.get(name, _UNKNOWN) for name in names}
    rows = {name: shares[name] for name in names}
    return {
        name: max(_LEAST, math.log(max(row.high, 1e-12) / max(row.low, 1e-12)) / (2 * SIGMAS))
        for name, row in rows.items()
    }


def _observations(path: Path, chip: Chip) -> Iterator[Observation]:
    if path.is_dir():
        yield step_observation(read_launch(path, chip))
    else:
        yield from _profile_observations(path, chip)


def step_observation(launch: LaunchedJob) -> Observation:
    assert launch.measured is not None

    def predict(shares: Shares) -> float:
        return planned_step(launch.job, shares, has_intervals=False).total

    return Observation(launch.name, launch.measured.total, predict)


def _profile_observations(path: Path, chip: Chip) -> Iterator[Observation]:
    """The operations of linear layers, timed alone by ``narrowgauge profile``."""
    for row in _profile_rows(path):
        recipe = parse_value(row["recipe"], str(path))
        tokens = row["num_sequences"] * row["sequence_length"]
        for layer in row["layers"]:
            shape = Shape(layer["out_features"], layer["in_features"])
            setting = setting_of(layer["pattern"].replace("*", "0"), recipe)
            for name, seconds in layer["parts_seconds"].items():
                if "." not in name and seconds > 0:
                    yield _operation(
                        f"{path.name}: {layer['pattern']}, {name}", seconds, shape, setting, tokens, chip, name
                    )


def _operation(
    label: str, seconds: float, shape: Shape, setting: Setting, tokens: int, chip: Chip, name: str
) -> Observation:
    return Observation(label, seconds, lambda shares: operation_seconds(shape, setting, tokens, chip, shares)[name])


def _profile_rows(path: Path) -> list[Row]:
    advice = "Name run folders, and files of narrowgauge profile --json."
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        rows = rows if isinstance(rows, list) else [rows]
        needed = {"recipe", "num_sequences", "sequence_length", "layers", "predicted"}
        if not rows or not all(isinstance(row, dict) and row.keys() >= needed for row in rows):
            raise ValueError("it holds no profile")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} is neither a run folder nor a profile: {reason}.", advice) from None
    if any(row["predicted"] for row in rows):
        raise DataError(f"{path} is a prediction: nothing was measured.", "Name what narrowgauge profile --json wrote.")
    return rows


def _chip_of(paths: Sequence[Path]) -> Chip:
    """The machine that the runs recorded; profiles were measured here."""
    machines = {path.name: read_run(path).run.get("machine", {}) for path in paths if path.is_dir()}
    kinds = {(m.get("device", "cpu"), m.get("processor"), m.get("num_threads")) for m in machines.values()}
    if len(kinds) > 1:
        said = "; ".join(" ".join(map(str, kind)) for kind in sorted(kinds, key=str))
        raise DataError(
            f"runs of one machine were requested, and these are of several: {said}.", "Calibrate each apart."
        )
    machine: Row = next(iter(machines.values()), {})
    device = machine.get("device", "cpu")
    if device != "cpu":
        return _chip_of_device(str(device))
    return processor(str(machine.get("capability", "AVX2")), int(machine.get("num_threads", os.cpu_count() or 1)))


def _chip_of_device(device: str) -> Chip:
    """The row of the table whose name begins as the device's does, such as ``NVIDIA H100 80GB HBM3``."""
    words = device.replace("NVIDIA", "").replace("GeForce", "").split()
    joined = "-".join(words[:2]).lower(), words[0].lower() if words else ""
    for start in joined:
        found = [chip for name, chip in CHIPS.items() if start and name.lower().startswith(start)]
        if len(found) == 1:
            return found[0]
    raise ChipError(f"the runs are of '{device}', which is not one chip of the table.", "Name it: --chip NAME.")


def processor(capability: str, num_threads: int) -> Chip:
    """A processor as a chip with nominal rates: what it reaches of them, its shares say.

    ``capability`` is that of its vectors, as PyTorch names it (``AVX2``); bfloat16 and float16 have float32's rate.

    Example:
        >>> processor("AVX2", 2).peak_tflops["float32"]
        0.16
    """
    lanes = next((count for name, count in _NOMINAL.items() if capability.startswith(name)), _NOMINAL["DEFAULT"])
    rate = lanes * _CLOCK_HZ * num_threads / 1e12
    return Chip(
        HERE,
        "CPU",
        capability,
        f"{num_threads} thread{'' if num_threads == 1 else 's'}",
        memory_gb=max(1, _memory_bytes() >> 30),
        memory_type="DDR",
        bandwidth_gb_per_second=_BANDWIDTH_GB_PER_SECOND * num_threads,
        peak_tflops=dict.fromkeys(("float32", "bfloat16", "float16"), rate),
        link="between processes",
        host_link="none",
        evidence="B",
        source=f"nominal: {lanes} operations a cycle at {_CLOCK_HZ / 1e9:g} GHz a thread",
        link_gb_per_second=_LINK_GB_PER_SECOND,
        peer_gb_per_second=_LINK_GB_PER_SECOND,
    )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 1 << 34


def _file(name: str) -> Path:
    return cache_folder() / "calibrations" / f"{name}.json"


def keep(calibration: Calibration) -> Path:
    """Write a calibration to the cache folder, in place of an earlier one of the same name; returns the file."""
    rows = {name: dataclasses.asdict(calibration.shares[name]) for name in calibration.fitted}
    content: dict[str, Any] = {
        "version": _VERSION,
        "chip": _chip_to_dict(calibration.chip),
        "shares": rows,
        "error": calibration.error,
        "worst": list(calibration.worst),
        "sources": list(calibration.sources),
    }
    file = _file(calibration.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode(), "Free some space, or set NARROWGAUGE_CACHE.")
    return file


def kept(name: str = HERE) -> Calibration:
    """The calibration that was kept as ``here`` or under a chip's full name.

    Raises:
        ChipError: there is none, or the file is damaged.
    """
    file = _file(name)
    advice = f"narrowgauge plan calibrate RUN…{'' if name == HERE else f' --chip {name}'} makes it."
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}")
        saved = content["chip"]
        # An older file may lack fields, which the table has.
        chip = replace(CHIPS[saved["name"]], **saved) if saved["name"] in CHIPS else Chip(**saved)
        rows = {key: Share(**row) for key, row in content["shares"].items()}
        shares = priors_of(chip).replaced(rows)
        [worst, error] = content["worst"]
        sources = tuple(content["sources"])
        return Calibration(name, chip, shares, tuple(rows), content["error"], (worst, error), sources)
    except FileNotFoundError:
        raise ChipError(f"chip '{name}' was requested, and nothing was calibrated as that.", advice) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChipError(f"the calibration {file} is damaged: {error}.", advice) from None


def _chip_to_dict(chip: Chip) -> dict[str, Any]:
    return {
        **dataclasses.asdict(chip),
        "peak_tflops": dict(chip.peak_tflops),
        "measured_tflops": dict(chip.measured_tflops),
    }


def calibration_lines(found: Calibration) -> list[str]:
    """A calibration in sentences: how well the runs agree, and each fitted share."""
    name, error = found.worst
    count = len(found.sources)
    chip = f"{found.chip.name}, {found.chip.architecture}, {found.chip.form_factor}"
    said = [
        f"Calibrated {chip} with {count} source{'s' * (count != 1)}: their times are met within {found.error:.1%} (root mean "
        f"square); the worst is {name}, {error:+.1%}."
    ]
    said += [f"  {each}: {found.shares[each]}" for each in found.fitted]
    if found.error > _POOR:
        said.append(
            "That is too much to plan with: steps of very small models are mostly what a library does between kernels, and runs "
            "beside other programs differ from hour to hour. Calibrate with larger models on a quiet machine."
        )
    if count <= len(found.fitted):
        said.append(
            f"{count} source{'s' * (count != 1)} cannot tell {len(found.fitted)} shares apart: what they leave open is in the "
            "intervals. Add runs of another model, batch or recipe."
        )
    return said


# ── the fit ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

_ROUNDS = 30
_STEP = 1e-3  # of a logarithm, for derivatives
_LARGEST_MOVE = 1.0  # of a logarithm, in one round
_STILL = 1e-2  # of a logarithm: a fit that moves less has ended
_LARGEST_SPREAD = 0.1  # of the errors, as a weight against priors
_OUTLIER = 2.5  # standard deviations from which an observation counts less


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured time, and how the planner predicts it from shares."""

    name: str
    seconds: float
    predict: Callable[[Shares], float]

    def log_error(self, shares: Shares) -> float:
        return math.log(self.predict(shares) / self.seconds)


@dataclass(frozen=True, slots=True)
class Fit:
    """All shares, the names of the fitted ones, the root mean square of the relative errors that are left, and the worst."""

    shares: Shares
    names: tuple[str, ...]
    error: float
    worst: tuple[str, float]


def fit_shares(
    observations: Sequence[Observation], shares: Shares, deviations: Mapping[str, float], source: str
) -> Fit:
    """Fit shares to observations.

    Those with a deviation, the prior's standard deviation of their logarithm, may move; the others stay. The intervals hold what
    the fit left over as well as what it could not determine.
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
        """Do one round; whether it moved enough for another."""
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
