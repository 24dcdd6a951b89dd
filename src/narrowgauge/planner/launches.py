"""Launches: a job as it was started, read from a file of settings or from the folder of a run.

A launch file has the settings of ``narrowgauge train`` that decide how long a step takes, and says where the job runs::

    model = "llama-8b"
    recipe = "bfloat16/word"
    batch_size = 64
    sequence_length = 8192

    [cluster]                 # or cluster = "cluster.toml"
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200

    [layout]                  # for layouts that train does not run; it then decides the batch as well
    shard = 64
    micro_batches = 1

    [measured]
    step_seconds = 3.9        # or tokens_per_second

Other settings of a training run may stand there too and are not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError
from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.attribution import MeasuredStep, measured_step
from narrowgauge.planner.clusters import Cluster, cluster_of, read_cluster
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model_configs import read_architecture
from narrowgauge.planner.shares import Shares
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.runs.record import read_run
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.notation import parse_value
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.toml_text import load_toml

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """A job as it was started.

    Args:
        name: of the file or folder.
        architecture, recipe, layout, cluster: see their modules.
        sequence_length: in tokens.
        measured: seconds of a step by part, where it was measured.
    """

    name: str
    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    measured: Terms | None = None

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.layout.num_sequences * self.sequence_length

    def planned_step(self, shares: Shares | None, *, has_intervals: bool = True) -> Terms:
        """The step as planned, without what a measured step leaves out: checkpoints and failures.

        Args:
            shares, has_intervals: as for :func:`~narrowgauge.planner.step_time.step_terms`.
        """
        step = step_terms(
            self.architecture,
            self.recipe,
            self.layout,
            self.cluster,
            self.sequence_length,
            shares,
            has_intervals=has_intervals,
        )
        return step.without("checkpoints", "faults")


def read_launch(path: str | Path, chip: Chip | None = None) -> Launch:
    """Read a launch.

    Args:
        path: a TOML file, or a run folder.
        chip: that runs it, where the launch does not say: run folders do not.
    Returns:
        The launch.
    Raises:
        DataError: the file cannot be read, or lacks a setting.
        ChipError: it does not say where it runs.
        RecordError: the run folder is damaged, or has too few steps to be measured.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _of_run(path, chip)
    table = _read(path)
    measured = _measured(table, path)
    cluster = _cluster(table, path, chip)
    own = table.get("layout")
    layout = _layout(own, path) if own is not None else layout_of(table, cluster.num_chips, str(path))
    launch = _launch(path.name, table, layout, cluster, str(path))
    if isinstance(measured, float):
        measured = _measured_terms(launch.tokens / measured, path)
    return dataclasses.replace(launch, measured=measured)


def _of_run(path: Path, chip: Chip | None) -> Launch:
    run = read_run(path)
    measured: MeasuredStep = measured_step(run)
    if chip is None:
        raise ChipError(
            f"the run {path} does not say on which chip of the table it ran.", "Add --chip NAME, or --chip here."
        )
    ranks = measured.num_ranks
    launch = _launch(
        path.name, run.config, layout_of(run.config, ranks, str(path)), cluster_of(chip, ranks, ranks), str(path)
    )
    inside = Terms(tuple(term for term in measured.terms if term.group != "outside"))
    return dataclasses.replace(launch, measured=inside)


def _launch(name: str, table: Settings, layout: Layout, cluster: Cluster, where: str) -> Launch:
    recipe = parse_value(_required(table, "recipe", where), where)
    return Launch(
        name,
        read_architecture(str(_required(table, "model", where))),
        recipe,
        layout,
        cluster,
        _whole(table, "sequence_length", where),
    )


def layout_of(table: Settings, num_ranks: int, where: str) -> Layout:
    """How ``narrowgauge train`` spreads a job over ranks.

    Args:
        table: its settings.
        num_ranks: that it runs on.
        where: they stand, for messages.
    Returns:
        The layout; ranks with unequal numbers of micro-batches wait for those with the most.
    Raises:
        DataError: a setting is missing, or they contradict the number of ranks.
    Example:
        >>> table = {"batch_size": 16, "gradient_accumulation_steps": 8, "replicas": 2}
        >>> layout = layout_of(table, 4, "here")
        >>> layout.data, layout.shard, layout.micro_batch, layout.micro_batches
        (2, 2, 2, 2)
    """
    batch, pieces = (
        _whole(table, "batch_size", where),
        _whole(table, "gradient_accumulation_steps", where, default=num_ranks),
    )
    replicas = _whole(table, "replicas", where, default=1)
    if batch % pieces or num_ranks % replicas or pieces < num_ranks:
        raise DataError(
            f"{where}: a batch of {batch} sequences in {pieces} micro-batches does not suit {num_ranks} ranks in "
            f"{replicas} replica{'s' * (replicas > 1)}.",
            "Each micro-batch has as many sequences, and each rank one micro-batch or more.",
        )
    is_sharded = num_ranks > 1 and table.get("shard", "full") == "full"
    return Layout(
        data=replicas if is_sharded else num_ranks,
        shard=num_ranks // replicas if is_sharded else 1,
        zero=3 if is_sharded else 0,
        micro_batch=batch // pieces,
        micro_batches=-(-pieces // num_ranks),
        recompute="full" if table.get("activation_checkpointing") else "none",
        offload="all" if table.get("offload") else "none",
        accumulation_dtype=str(table.get("accumulation_dtype") or "float32"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return load_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot read the launch {path}: {reason}.", "It is a TOML file of settings, or a run folder."
        ) from None


def _required(table: Settings, key: str, where: str) -> Any:
    if table.get(key) is None:
        raise DataError(
            f"{where} does not say its {key}.", "A launch needs model, recipe, batch_size, sequence_length."
        )
    return table[key]


def _whole(table: Settings, key: str, where: str, default: int | None = None) -> int:
    value = default if default is not None and table.get(key) is None else _required(table, key, where)
    if type(value) is not int or value < 1:
        raise DataError(f"{where}: {key} = {value!r} is not a whole number above zero.", f"Write {key} = 8.")
    return value


def _layout(table: Any, path: Path) -> Layout:
    known = {field.name: field for field in dataclasses.fields(Layout)}
    if not isinstance(table, dict) or (unknown := sorted(table.keys() - known.keys())):
        found = f"the key {unknown[0]!r}" if isinstance(table, dict) else f"{table!r}"
        raise DataError(f"{path}: [layout] has {found}.", f"Known: {', '.join(known)}.")
    for name, value in table.items():
        if type(value) is not type(known[name].default):
            raise DataError(
                f"{path}: [layout] has {name} = {value!r}.", f"For instance {name} = {known[name].default!r}."
            )
    return Layout(**table)


def _cluster(table: Settings, path: Path, chip: Chip | None) -> Cluster:
    given = table.get("cluster")
    if isinstance(given, str):
        return read_cluster(path.parent / Path(given).expanduser())
    if given is None and chip is not None:
        layout = table.get("layout")
        return cluster_of(chip, _layout(layout, path).num_ranks if layout is not None else 1)
    if not isinstance(given, dict) or not {"chip", "chips"} <= given.keys():
        raise ChipError(f"{path} does not say where it runs.", 'Add [cluster] with chip = "H100-SXM" and chips = 8.')
    rest = {key: value for key, value in given.items() if key not in ("chip", "chips")}
    try:
        return cluster_of(given["chip"], _whole(given, "chips", f"{path}, [cluster]"), **rest)
    except (TypeError, AttributeError):
        raise DataError(
            f"{path}: [cluster] has a key or a value that is not known.", "See the page Planning."
        ) from None


def _measured(table: Settings, path: Path) -> Terms | float | None:
    """The measured step; a float is tokens per second."""
    given = table.get("measured")
    if given is None:
        return None
    if isinstance(given, dict) and len(given) == 1:
        [(key, value)] = given.items()
        if key in ("step_seconds", "tokens_per_second") and type(value) in (int, float) and value > 0:
            return float(value) if key == "tokens_per_second" else _measured_terms(float(value), path)
    raise DataError(f"{path}: [measured] is {given!r}.", "Write step_seconds or tokens_per_second, above zero.")


def _measured_terms(seconds: float, path: Path) -> Terms:
    return Terms((Term("step", "measured step", seconds, f"[measured] of {path.name}", str(path)),))
