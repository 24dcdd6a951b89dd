"""States: a training state taken from one storage into another, and put back into a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.assembly import prepare
from narrowgauge.conversion.conversion_report import Kept, Pair, Report, compare
from narrowgauge.conversion.folders import (
    is_ours,
    locate,
    new_folder,
    parted,
    read_checkpoint,
    read_own,
    write_checkpoint,
    write_report,
    write_run,
)
from narrowgauge.conversion.foreign import read_foreign
from narrowgauge.conversion.preflight import require_convertible
from narrowgauge.conversion.source import Source
from narrowgauge.errors import DataError, RecipeError, RecordError
from narrowgauge.numerics.summation import fingerprint_all
from narrowgauge.numerics.update_metrics import UPDATE_SUMS
from narrowgauge.optim.elementwise_optimizers import AdamW
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STATE_NAMES, Storage


def convert(
    source: str | Path,
    recipe: str | Path | Recipe,
    out: str | Path | None = None,
    optimizer: str | Path | None = None,
    names: Sequence[str] = (),
) -> Report:
    """Convert a training state to the storage of a recipe.

    Law: exact where the target holds the value, else weights are cut to the nearest and moments as their code says; the same
    source and recipe give the same bits; ``out`` is there whole or not at all.

    Args:
        source: a run folder or one of its checkpoints; a ``torch.save`` file of ``{"model": …, "optimizer": …}`` with the
            state of a ``torch.optim`` Adam or AdamW, of a bitsandbytes 8-bit one, or of ours; a checkpoint of Lightning or
            of Accelerate's ``save_state``; or weights alone: a Hugging Face folder, a safetensors file, a ``torch.save``
            file of a ``state_dict``.
        recipe: as in :func:`narrowgauge.prepare`.
        out: the folder to make, for :func:`narrowgauge.restore`, and of a run for ``narrowgauge resume`` too; ``None`` takes
            one beside the source, named after the recipe.
        optimizer: a ``torch.save`` file with the optimizer's state, where it lies apart from the weights.
        names: ``[name for name, _ in model.named_parameters()]``, where the optimizer was not given names and the files do
            not tell the model's order.
    Returns:
        What was converted, what it cost, and what was left out; ``out/conversion.json`` says it too.
    Raises:
        RecipeError: a recipe that does not suit these parameters, or states that are not of its storage.
        DataError: files that cannot be read, states of another rule than Adam's, names or shapes that do not match.
        RecordError: a damaged checkpoint, ``out`` exists and is not empty, or the disk refuses.

    Cost: memory of 20 to 55 bytes a parameter, one read and one write.

    Example:
        >>> import tempfile, torch, narrowgauge as ng
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.named_parameters())
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/mine.pt")
        >>> report = ng.convert(f"{folder}/mine.pt", "bfloat16/exact", f"{folder}/exact")
        >>> [kept.exact_share for kept in report.kept]
        [1.0, 1.0, 1.0]
    """
    path, state = Path(source), None if optimizer is None else Path(optimizer)
    policy = require_convertible(path, recipe, None if out is None else Path(out), state)
    place = Path(out) if out is not None else _beside(path, policy)
    require_free(place)
    found = _read(path, state, names)
    taken, kept = take(found, policy)
    tensors, record = _checkpoint(found, taken, policy)
    dropped = ("readings of the audit",) if set(found.others) - set(tensors) else ()
    left_out = (*found.left_out, *dropped)
    report = Report(str(path), str(place), found.origin, policy.name, found.step, kept, left_out)
    with new_folder(place) as folder:
        write_checkpoint(folder, found.step, tensors, record)
        write_report(folder, report, policy)
        if found.run is not None:
            write_run(folder, found.run, report, policy)
    return report


def restore(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Put a converted state into a model that :func:`narrowgauge.prepare` made ready, and into its optimizer.

    Args:
        folder: what :func:`narrowgauge.convert` wrote, or a run folder; its newest checkpoint is taken.
        model, optimizer: of the recipe that the state is in; the model itself where the state is of a module around it,
            such as a LightningModule, or DistributedDataParallel.
    Returns:
        Optimizer steps done.
    Raises:
        RecordError: no checkpoint, a damaged one, or one whose names, shapes or formats are not the model's.
        RecipeError: the state is in another storage than the optimizer's.

    Example:
        >>> import tempfile, torch, narrowgauge as ng
        >>> folder = tempfile.mkdtemp()
        >>> torch.save(torch.nn.Linear(4, 4).state_dict(), f"{folder}/weights.pt")
        >>> report = ng.convert(f"{folder}/weights.pt", "bfloat16/word", f"{folder}/word")
        >>> model, optimizer = ng.prepare(torch.nn.Linear(4, 4), "bfloat16/word")
        >>> ng.restore(f"{folder}/word", model, optimizer)
        0
    """
    _, checkpoint = locate(Path(folder))
    tensors, record = read_checkpoint(checkpoint)
    weights, states = parted(tensors)
    places = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    needed = {name for name, _ in model.named_parameters()}
    weights, states = _unwrapped(weights, states, needed)
    for name in sorted((needed - set(weights)) | (set(weights) - set(places))):
        has, lacks = (checkpoint, type(model).__name__) if name in weights else (type(model).__name__, checkpoint)
        raise RecordError(f"'{name}' is in {has}, and not in {lacks}.", "Give the model whose state was converted.")
    for name, value in weights.items():
        if (value.shape, value.dtype) != (places[name].shape, places[name].dtype):
            raise RecordError(
                f"'{name}' is {value.dtype} of shape {tuple(value.shape)} in {checkpoint}, and {places[name].dtype} of shape "
                f"{tuple(places[name].shape)} in the model.",
                "Prepare that model with the recipe of the checkpoint.",
            )
    names = optimizer.parameter_names()
    optimizer.load_states({parameter: states[name] for parameter, name in names.items() if name in states})
    with torch.no_grad():
        for name, value in weights.items():
            places[name].copy_(value)
    return int(record["step"])


def _unwrapped(
    weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]], needed: set[str]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Both under the model's own names, where all of theirs begin with the name of one module around it."""
    first = {name.partition(".")[0] for name in weights}
    prefix = f"{min(first)}." if len(first) == 1 else ""
    if not prefix or needed <= set(weights) or not needed <= {name.removeprefix(prefix) for name in weights}:
        return weights, states
    return {n.removeprefix(prefix): v for n, v in weights.items()}, {
        n.removeprefix(prefix): v for n, v in states.items()
    }


def _read(path: Path, optimizer: Path | None, names: Sequence[str]) -> Source:
    if not is_ours(path):
        return read_foreign(path, optimizer, names)
    if optimizer is not None:
        raise DataError(f"{path} holds its own state, and {optimizer} was given too.", "Leave --optimizer out.")
    return read_own(path)


def _beside(path: Path, recipe: Recipe) -> Path:
    """``NAME-RECIPE`` beside the source, or beside the run whose checkpoint it is."""
    whole = locate(path)[0] if is_ours(path) else path
    whole = whole if whole.name.strip(".") else whole.resolve()
    name = whole.name if whole.is_dir() else whole.stem
    return whole.with_name(f"{name}-{recipe.name.replace('/', '-')}")


# ── from storage to storage ─────────────────────────────────────────────────────────────────────────────────────────────


class Checkpoint(nn.Module):
    """Parameters under their names, without what computes with them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(value))


def take(source: Source, recipe: Recipe) -> tuple[Optimizer, tuple[Kept, ...]]:
    """Take a state into the storages of a recipe.

    Args:
        source: the state.
        recipe: what to keep it in.
    Returns:
        An optimizer that holds it, whose parameters have the source's names, and what each kind of value lost.
    """
    values, moments = _float32(source)
    model, optimizer = prepare(Checkpoint(values), recipe, max_grad_norm=None, audit_every=0, compile=False)
    named = dict(model.named_parameters())
    same = {
        name for name in named if _row(recipe, named[name], name) == source.rows.get(name) and name in source.states
    }
    with torch.no_grad():
        for name in same:
            named[name].copy_(source.weights[name])
    optimizer.load_states({named[name]: source.states[name] for name in same})
    others = {name: p for name, p in named.items() if name not in same}
    optimizer.adopt(
        {p: values[name] for name, p in others.items()},
        {p: moments[name] for name, p in others.items() if name in moments},
    )

    def pairs(kind: str) -> Iterator[Pair]:
        given = values if kind == "weight" else {name: entry[kind] for name, entry in moments.items()}
        for name, value in given.items():
            seen = named[name].detach() if kind == "weight" else None
            code = _row(recipe, named[name], name).code(kind)
            yield value, optimizer.stored(named[name], kind), code, seen

    kinds = ("weight", *STATE_NAMES) if moments else ("weight",)
    return optimizer, tuple(compare(kind, pairs(kind)) for kind in kinds)


def _row(recipe: Recipe, parameter: Tensor, name: str) -> Storage:
    return recipe.storage_of(name, parameter.ndim)


def _float32(source: Source) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Weights and moments as float32."""
    if not source.rows:
        return {name: value.float().contiguous() for name, value in source.weights.items()}, source.states
    named = {name: nn.Parameter(value) for name, value in source.weights.items()}
    groups: dict[Storage, list[tuple[str, Tensor]]] = {}
    for name, parameter in named.items():
        groups.setdefault(source.rows[name], []).append((name, parameter))
    optimizer = AdamW(
        [{"params": members, "storage": row} for row, members in groups.items()], audit_every=0, compile=False
    )
    optimizer.load_states({named[name]: entry for name, entry in source.states.items()})
    known = optimizer.states()
    for name, entry in source.states.items():
        if odd := set(entry) - set(known[named[name]]):
            raise RecipeError(
                f"the state of '{name}' holds '{min(odd)}', which AdamW in storage '{source.rows[name].name}' does not keep.",
                "Only states of Adam and AdamW can be converted.",
            )
    moments = {
        name: {"step": entry["step"], **{kind: optimizer.stored(named[name], kind) for kind in STATE_NAMES}}
        for name, entry in source.states.items()
    }
    return {name: optimizer.stored(parameter) for name, parameter in named.items()}, moments


def _checkpoint(source: Source, optimizer: Optimizer, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of the checkpoint to write."""
    names = optimizer.parameter_names()
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, entry in optimizer.states().items():
        tensors |= {f"optimizer.{names[parameter]}.{key}": value for key, value in entry.items()}
    for key, value in source.others.items():
        name = key.removeprefix("audit.")
        # What was read of another storage says nothing of this one.
        if name == key or source.rows[name] == recipe.storage_of(name, source.weights[name].ndim):
            tensors[key] = value
    nothing = {"tokens": 0, "seconds": 0.0, "audit_total": [0.0] * len(UPDATE_SUMS), "num_skipped": 0}
    stored = {name: optimizer.stored(parameter) for parameter, name in names.items()}
    # The run that is written has a recipe and rows of its own.
    record = {key: value for key, value in source.record.items() if key not in ("settings", "rows")}
    return tensors, {**nothing, **record, "step": source.step, "fingerprint": fingerprint_all(stored)}
