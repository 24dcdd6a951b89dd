"""``convert`` a training state to another storage or another framework's checkpoint, and ``restore`` it into a model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.assembly.preparation import convert_model, optimizer_for
from narrowgauge.checkpoints.checkpoint_files import load_whole, saved_tensors
from narrowgauge.checkpoints.conversion.conversion_report import Pair, Report, ValueLoss, compare
from narrowgauge.checkpoints.conversion.folders import (
    is_ours,
    locate,
    new_folder,
    parted,
    read_own,
    read_record,
    require_intact,
    write_checkpoint,
    write_report,
    write_run,
)
from narrowgauge.checkpoints.conversion.foreign import SHARDED, open_sharded, read_foreign, sharded_format
from narrowgauge.checkpoints.conversion.preflight import require_convertible
from narrowgauge.checkpoints.conversion.sharded import WEIGHT
from narrowgauge.checkpoints.conversion.source import Source
from narrowgauge.checkpoints.state_tensors import state_tensors
from narrowgauge.distributed.ranks import ALONE, all_ranks
from narrowgauge.errors import DataError, RecipeError, RecordError
from narrowgauge.numerics.checksums import fingerprint_all
from narrowgauge.numerics.shards import is_sharded, local_of, own_part
from narrowgauge.numerics.update_metrics import UPDATE_SUMS
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.optim.state_dict import replicated_states
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import FLOAT32, STATE_NAMES, Storage


def convert(
    source: str | Path,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    optimizer: str | Path | None = None,
    names: Sequence[str] = (),
    like: str | Path | None = None,
) -> Report:
    """Convert a training state to the storage of a recipe, or to a checkpoint of another framework.

    Invariant: a value that the target represents stays exact; otherwise weights round to nearest, moments as their code does.
    The same source and recipe give the same bits. ``out`` is complete or does not exist.

    Args:
        source: a run folder or one of its checkpoints; a ``torch.save`` file of ``{"model": …, "optimizer": …}`` with the
            state of a ``torch.optim`` Adam or AdamW, of a bitsandbytes 8-bit Adam, or of one of our optimizers; a checkpoint
            of Lightning or of Accelerate's ``save_state``; a checkpoint of DeepSpeed ZeRO, Megatron-Core or nanotron; or only
            weights: a Hugging Face folder, a safetensors file, a ``torch.save`` file of a ``state_dict``.
            ``narrowgauge show frameworks`` lists all of them.
        recipe: as in :func:`narrowgauge.prepare`.
        out: the folder to create, for :func:`narrowgauge.restore`, and for ``narrowgauge resume`` if the source is a run;
            default: next to the source, named after the recipe.
        optimizer: a ``torch.save`` file with the optimizer state, if separate from the weights.
        names: ``[name for name, _ in model.named_parameters()]``, needed where the optimizer has no parameter names and
            the files do not contain the model's order.
        like: instead of a recipe, a checkpoint of DeepSpeed, Megatron-Core or nanotron of the same model: ``out`` becomes a
            copy of it with the weights, moments and step count of the source, in float32, which holds every storage's values.
            The copy that the model computes with is rounded to nearest.
    Returns:
        What was converted, lost and left out; also written to ``out/conversion.json``.
    Raises:
        RecipeError: a recipe that does not fit these parameters, states that do not match their storage, or float64 in either.
        DataError: unreadable files, states of an optimizer other than Adam, names or shapes that do not match.
        RecordError: a damaged checkpoint, ``out`` exists and is not empty, or a disk error.
    Cost: 20 to 55 bytes of memory per parameter, one read and one write.
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
    template = None if like is None else Path(like)
    policy = require_convertible(path, recipe, None if out is None else Path(out), state, template)
    if policy is None:
        return _write_like(path, _read(path, state, names), cast("Path", template), out)
    place = Path(out) if out is not None else _default_folder(path, policy)
    require_free(place)
    found = _read(path, state, names)
    taken, kept = take(found, policy)
    tensors, record = _checkpoint(found, taken, policy)
    dropped = ("audit sums",) if set(found.others) - set(tensors) else ()
    left_out = (*found.left_out, *dropped)
    report = Report(str(path), str(place), found.origin, policy.name, found.step, kept, left_out)
    with new_folder(place) as folder:
        write_checkpoint(folder, found.step, tensors, record)
        write_report(folder, report, policy)
        if found.run is not None:
            write_run(folder, found.run, report, policy)
    return report


def restore(folder: str | Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load a converted state into a model and optimizer from :func:`narrowgauge.prepare`.

    Args:
        folder: output of :func:`narrowgauge.convert`, or a run folder; its newest checkpoint is loaded.
        model, optimizer: prepared with the recipe of the state. If the state was saved from a wrapper, such as a
            LightningModule or DistributedDataParallel, pass the wrapped model. A model that is sharded takes its part of any
            checkpoint; all ranks call this.
    Returns:
        Optimizer steps taken.
    Raises:
        RecordError: no checkpoint, a damaged one, or one whose names, shapes or dtypes differ from the model's.
        RecipeError: the storage of the state differs from the optimizer's.
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
    owners = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    # Ranks that hold shards share the reading of the files; each then reads its own part of them.
    require_intact(checkpoint, all_ranks().apart() if any(map(is_sharded, owners.values())) else ALONE)
    saved = saved_tensors(checkpoint)
    needed = {name for name, _ in model.named_parameters()}
    weights, states = _unwrapped(*parted({key: key for key in saved}), needed)
    for name in sorted((needed - set(weights)) | (set(weights) - set(owners))):
        has, lacks = (checkpoint, type(model).__name__) if name in weights else (type(model).__name__, checkpoint)
        raise RecordError(f"'{name}' is in {has} but not in {lacks}.", "Give the model whose state was converted.")
    for name, key in weights.items():
        found, owner = saved[key], owners[name]
        if (found.shape, found.dtype) != (tuple(owner.shape), owner.dtype):
            raise RecordError(
                f"'{name}' is {found.dtype} of shape {found.shape} in {checkpoint}, and {owner.dtype} of shape "
                f"{tuple(owner.shape)} in the model.",
                "Prepare the model with the recipe of the checkpoint.",
            )
    entries = {
        parameter: _own_entry(checkpoint, states[name], optimizer, parameter)
        for parameter, name in optimizer.parameter_names().items()
        if name in states
    }
    optimizer.load_states(entries)
    with torch.no_grad():
        for name, key in weights.items():
            owner = owners[name]
            local_of(owner).copy_(own_part(owner, load_whole(checkpoint, [key])[key]))
    return int(read_record(checkpoint)["step"])


def _own_entry(checkpoint: Path, keys: Mapping[str, str], optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """This rank's shard of a parameter's state; tensors are read one by one."""
    whole = {"step", *replicated_states(optimizer, parameter)}
    entry = {}
    for state, key in keys.items():
        value = load_whole(checkpoint, [key])[key]
        entry[state] = value if state in whole else own_part(parameter, value)
    return entry


def _unwrapped(
    weights: dict[str, str], states: dict[str, dict[str, str]], needed: set[str]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Weights and states without the prefix of a wrapper module, if all names have it."""
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
        raise DataError(
            f"{path} contains its own optimizer state, and {optimizer} was given too.", "Leave --optimizer out."
        )
    return read_own(path)


def _default_folder(path: Path, recipe: Recipe) -> Path:
    """``NAME-RECIPE`` next to the source, or next to the run of a checkpoint."""
    whole = locate(path)[0] if is_ours(path) else path
    whole = whole if whole.name.strip(".") else whole.resolve()
    name = whole.name if whole.is_dir() else whole.stem
    return whole.with_name(f"{name}-{recipe.name.replace('/', '-')}")


# ── from storage to storage ─────────────────────────────────────────────────────────────────────────────────────────────


class Checkpoint(nn.Module):
    """A module tree that holds named parameters and has no ``forward``; messages about the model call it by this name."""

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


def take(source: Source, recipe: Recipe) -> tuple[Optimizer, tuple[ValueLoss, ...]]:
    """Convert a state to the storages of a recipe.

    Returns:
        An optimizer with the state, whose parameters have the source's names, and the losses of each kind of value.
    """
    values, moments = _float32(source)
    converted = convert_model(Checkpoint(values), recipe)
    optimizer = optimizer_for(converted, audit_every=0, compile=False)
    named = dict(converted.model.named_parameters())
    same = {
        name
        for name in named
        if _storage(recipe, named[name], name) == source.storages.get(name) and name in source.states
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
            code = _storage(recipe, named[name], name).code(kind)
            yield value, optimizer.stored(named[name], kind), code, seen

    kinds = ("weight", *STATE_NAMES) if moments else ("weight",)
    return optimizer, tuple(compare(kind, pairs(kind)) for kind in kinds)


def _storage(recipe: Recipe, parameter: Tensor, name: str) -> Storage:
    return recipe.storage_of(name, parameter.ndim)


def _float32(source: Source) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    if not source.storages:
        return {name: value.float().contiguous() for name, value in source.weights.items()}, source.states
    if any(storage.arithmetic == "float64" for storage in source.storages.values()):
        raise RecipeError(
            f"a state of '{source.origin}' was given, which stores float64, and a conversion carries float32.",
            "Export its weights with narrowgauge export RUN OUT --dtype float32, and train from them with --model OUT.",
        )
    named = {name: nn.Parameter(value) for name, value in source.weights.items()}
    groups: dict[Storage, list[tuple[str, Tensor]]] = {}
    for name, parameter in named.items():
        groups.setdefault(source.storages[name], []).append((name, parameter))
    optimizer = AdamW(
        [{"params": members, "storage": storage} for storage, members in groups.items()], audit_every=0, compile=False
    )
    optimizer.load_states({named[name]: entry for name, entry in source.states.items()})
    known = optimizer.states()
    for name, entry in source.states.items():
        if odd := set(entry) - set(known[named[name]]):
            raise RecipeError(
                f"the state of '{name}' contains '{min(odd)}', which AdamW in storage '{source.storages[name].name}' does not "
                "have.",
                "Only states of Adam and AdamW can be converted.",
            )
    moments = {
        name: {"step": entry["step"], **{kind: optimizer.stored(named[name], kind) for kind in STATE_NAMES}}
        for name, entry in source.states.items()
    }
    return {name: optimizer.stored(parameter) for name, parameter in named.items()}, moments


def _checkpoint(source: Source, optimizer: Optimizer, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
    names = optimizer.parameter_names()
    tensors = state_tensors([(name, parameter) for parameter, name in names.items()], optimizer)
    for key, value in source.others.items():
        name = key.removeprefix("audit.")
        # Audit sums are valid only for the storage that they were measured with.
        if name == key or source.storages[name] == recipe.storage_of(name, source.weights[name].ndim):
            tensors[key] = value
    nothing = {"tokens": 0, "seconds": 0.0, "audit_total": [0.0] * len(UPDATE_SUMS), "num_skipped": 0}
    stored = {name: optimizer.stored(parameter) for parameter, name in names.items()}
    # The new run has its own recipe and storages.
    record = {key: value for key, value in source.record.items() if key not in ("settings", "rows")}
    return tensors, {**nothing, **record, "step": source.step, "fingerprint": fingerprint_all(stored)}


# ── checkpoints of other frameworks, written ──────────────────────────────────────────────────────────────────────────


def _write_like(path: Path, source: Source, like: Path, out: str | Path | None) -> Report:
    """Write a state into a copy of a checkpoint of another framework, and return the losses, found by reading what was written.

    Args:
        path: of the source.
        like: the checkpoint to copy; it is not changed.
        out: the folder to create; ``None``: next to the source, named after the framework.
    """
    framework = sharded_format(like)
    if framework is None:
        raise DataError(
            f"{like} is no checkpoint of a framework that can be written.", f"Give one of {', '.join(SHARDED)}."
        )
    place = Path(out) if out is not None else path.with_name(f"{path.stem}-{framework.split()[0].lower()}")
    require_free(place)
    weights, moments = _float32(source)
    values = {WEIGHT: weights, **{kind: {name: entry[kind] for name, entry in moments.items()} for kind in STATE_NAMES}}
    step = max((int(entry["step"]) for entry in moments.values()), default=source.step)
    template = open_sharded(framework, like)
    if strange := sorted(set(weights) - {fragment.name for fragment in template.fragments}):
        raise DataError(
            f"'{strange[0]}' is not among the weights of {like}.",
            "Give a checkpoint of the same model, with the same names.",
        )
    with new_folder(place) as folder:
        _copy(like, template.where, folder)
        open_sharded(framework, folder, writable=True).fill(values, step)
        written = open_sharded(framework, folder).source()
    found = {WEIGHT: written.weights, **{kind: {n: e[kind] for n, e in written.states.items()} for kind in STATE_NAMES}}

    def pairs(kind: str) -> Iterator[Pair]:
        for name, value in found[kind].items():
            yield values[kind][name], value.float(), FLOAT32, None

    kept = tuple(compare(kind, pairs(kind)) for kind in (WEIGHT, *STATE_NAMES) if found[kind])
    others = [key for key in source.others if key.startswith("audit.")]
    left_out = (
        *source.left_out,
        *(["audit sums"] if others else []),
        "settings and data position, which are those of the copy",
    )
    return Report(str(path), str(place), source.origin, framework, step, kept, left_out)


def _copy(like: Path, checkpoint: Path, folder: Path) -> None:
    """Copy one checkpoint, and the files beside it that name it as the newest."""
    if checkpoint == like:
        shutil.copytree(like, folder, dirs_exist_ok=True)
        return
    for entry in like.iterdir():
        if entry.is_file():
            shutil.copy2(entry, folder)
    shutil.copytree(checkpoint, folder / checkpoint.relative_to(like))
