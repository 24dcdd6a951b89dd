"""Compare two sets of weights, tensor by tensor: models, state_dicts, files. No code of a model runs.

Values are compared once both have the format of fewer bits. The format of codes is theirs at the scales
that lie beside them. A buffer is compared in the wider format: a buffer that was rounded computes
something else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from narrowgauge.errors import RecordError
from narrowgauge.measuring.adapters import is_adapted, name_without_adapters, product_of
from narrowgauge.measuring.reading import Readings, measured
from narrowgauge.measuring.units import unit_of
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row, Table

CHUNK = 1 << 17
"""Elements that are compared at once: they stay in the cache."""
MOST_ROWS = 8
"""Printed tensors."""
SCALES = ("_scale", "_scale_inv", "_scales")
"""Ends of the names of scales beside codes. All multiply the codes."""
SLACK = 2.0**-12
"""Relative error of a division by a scale, which may be a product with its inverse."""
BLOCK = 32
MOST_LEVELS = 16
"""Values of a block of 32 that four bits hold. Weights of 16 bits have about 30."""
MODELS = ("model", "model_state_dict", "module", "state_dict", "app")
"""Keys under which checkpoints hold the weights of a model."""
MOST_TIMES = 0.05
"""Distance from the adapters' own product that roundings of a merge may give."""
Weights = str | Path | nn.Module | Mapping[str, Any]


class Tensors:
    """Hold the tensors of a model, a state_dict, a ``.safetensors`` file or a folder of them.

    Attributes:
        values: tensors by name, without the prefixes of wrappers and adapters.
        names: names that share the tensor of a name, of models alone.
        buffers: names of buffers.
        adapted: layers with adapters, by the name of their weight.

    Raises:
        RecordError: a path holds no safetensors file, a damaged one, or tensors in parts.
    """

    def __init__(self, weights: Weights) -> None:
        self.values: dict[str, Tensor] = {}
        self.names: dict[str, list[str]] = {}
        self.buffers: set[str] = set()
        self.adapted: dict[str, Any] = {}
        if isinstance(weights, nn.Module):
            self._add_module(weights)
        elif isinstance(weights, Mapping):
            self._add(weights)
        else:
            try:
                self._add_files(Path(weights))
            except (OSError, SafetensorError, ValueError, KeyError) as error:
                raise RecordError(
                    f"Cannot read weights from {weights}: {error}.", "Name another file or folder."
                ) from error

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.values[_plain(name)] = value.detach()

    def _add_module(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers())
        self._add(parameters | buffers)
        self.buffers = set(map(_plain, buffers))
        names: dict[int, list[str]] = {}
        for name, x in parameters.items():
            self.names[_plain(name)] = names.setdefault(id(x), [])
            self.names[_plain(name)].append(_plain(name))
        for name, layer in model.named_modules():
            if is_adapted(layer):
                self.adapted[f"{name_without_adapters(name)}.weight"] = layer

    def _add_files(self, path: Path) -> None:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        if not files and (path / ".metadata").exists():
            self._add(distributed(path))
        for file in files:
            values = load_file(file)
            if not self.values.keys().isdisjoint(map(_plain, values)):
                raise ValueError("two of its files hold parts of one tensor")
            self._add(values)
        if not self.values:
            raise ValueError("it holds no safetensors file, and no checkpoint of torch.distributed")

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, with what its adapters add."""
        x = whole(self.values[name])
        layer = self.adapted.get(name)
        if layer is not None and not layer.merged_adapters:
            x = x.double() + product_of(layer)
        return x

    def scale(self, name: str) -> Tensor | None:
        """Return the factor of each value of a tensor of codes; ``None`` if no scales are beside it."""
        x = self.values[name]
        for end in SCALES:
            scale = self.values.get(name + end)
            if x.element_size() == 1 and scale is not None:
                return _expanded(_as_numbers(whole(scale)), x.shape)
        return None

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Write the values into the tensors of a model that have their names."""
        for name, p in model.state_dict(keep_vars=True).items():
            plain = _plain(name)
            if plain in self.values and self.values[plain].shape == p.shape:
                scale = self.scale(plain)
                x = self.read(plain)
                p.copy_(x if scale is None else x.float() * scale)

    def alone(self, other: Tensors) -> list[str]:
        """Return the names that another set lacks in their shape, under each of their tied names.

        Buffers are left out, which no file may hold, and scales.
        """
        names = []
        for name, x in self.values.items():
            tied = self.names.get(name, [name])
            shapes = [other.values[key].shape for key in tied if key in other.values]
            is_scale = any(
                name.removesuffix(end) in self.values for end in SCALES if name.endswith(end)
            )
            is_left_out = is_scale or name in self.buffers or ".lora_" in name
            if x.shape not in shapes and not is_left_out:
                names.append(name)
        return sorted(names)

    def ties(self) -> set[str]:
        """Return the names of each tensor that has several, with signs of equality."""
        return {" = ".join(names) for names in self.names.values() if len(names) > 1}


def distributed(path: Path) -> dict[str, Tensor]:
    """Read the weights of a checkpoint of ``torch.distributed.checkpoint``, without a process group."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    values: dict[str, Tensor] = {}
    for key, entry in metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("optim"):
            values[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load(values, checkpoint_id=path, no_dist=True)
    names = {}
    for key, x in values.items():
        owner, _, name = key.partition(".")
        names[name if owner in MODELS else key] = x
    return names


def _as_numbers(scale: Tensor) -> Tensor:
    """Return scales as float32: bytes are the exponents of an E8M0."""
    if scale.dtype is torch.uint8:
        return torch.exp2(scale.float() - 127)
    return scale.float()


def _expanded(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a scale for each value: one of all, of each row, or of each block."""
    while scale.ndim < len(shape):
        scale = scale.unsqueeze(-1)
    for dim, size in enumerate(shape):
        if 1 < scale.shape[dim] < size:
            repeats = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(repeats, dim).narrow(dim, 0, size)
    return scale.expand(shape)


def _plain(name: str) -> str:
    return name_without_adapters(name).replace(".base_layer.", ".")


class Same(Readings):
    """Hold the differences of two models; ``print`` shows them.

    Attributes:
        rows: a dict for each tensor of both, the farthest first: ``name``, ``dtype``, ``values``;
            ``differ`` and ``nonfinite`` (numbers of values); ``change`` (‖second − first‖ /
            ‖first‖), ``factor`` (the multiple of the first that is nearest), ``is_one`` (a vector
            of ones), ``adapter_times`` (how many times more the second holds the adapters), ``is_coded`` (compared
            as codes, or within half their gap).
    """

    rows: Sequence[Row] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the readings and rows as values for JSON."""
        return super().to_dict() | {"rows": self.rows}


def compare_weights(first: Weights, second: Weights) -> Same:
    """Compare two sets of weights."""
    before = Tensors(first)
    after = Tensors(second)
    rows = []
    for name, x in before.values.items():  # in an order that all ranks share
        if name in after.values and x.shape == after.values[name].shape:
            rows.append(_row(name, before, after))
    rows.sort(key=lambda row: (not row["differ"], -row["change"], row["name"]))
    result = Same([], [*_lines(rows), *_of_adapters(rows)])
    result.rows = rows
    unlike = [row["name"] for row in rows if row["differ"]]
    for side, here, there in (("first", before, after), ("second", after, before)):
        lone = here.alone(there)
        ties = here.ties() - there.ties()
        unlike += lone
        if ties and there.names:
            result.lines.append(f"tied in the {side} alone: {told(sorted(ties))}")
        if lone:
            result.lines.append(f"only in the {side}, or in another shape: {told(lone)}")
    bad = [row["name"] for row in rows if row["nonfinite"]]
    if unlike:
        result.add("other-weights", unlike, len(set(unlike)))
    if bad:
        number = sum(row["nonfinite"] for row in rows)
        result.readings.append(measured("nonfinite", bad, number, 0, stage="start"))
    return result


def _row(name: str, before: Tensors, after: Tensors) -> Row:
    x = before.read(name)
    y = after.read(name)
    dtypes = before.values[name].dtype, after.values[name].dtype
    dtype = max(dtypes, key=unit_of)
    if name in before.buffers | after.buffers or not y.is_floating_point():
        dtype = torch.promote_types(*dtypes)
    layer = (after.adapted | before.adapted).get(name)
    pair = _at_scales(x, y, before.scale(name), after.scale(name))
    is_coded = pair is not None
    if pair is None and layer is None and x.is_floating_point():
        pair = _on_grids(x, y)
        is_coded = pair is not None
    first, second = pair or (x.to(dtype), y.to(dtype))
    row: Row = {
        "name": name, "dtype": " → ".join(dict.fromkeys(map(dtype_name, dtypes))), "values": y.numel(),
        "is_one": y.ndim == 1 and bool((y == 1).all()), "adapter_times": None, "is_coded": is_coded,
        **_difference(first, second),
    }  # fmt: skip
    if layer is not None:
        added = y.double() - x.double()
        row["adapter_times"] = times = _difference(product_of(layer), added)["factor"]
        if row["change"] <= unit_of(dtype) and abs(times) <= MOST_TIMES:
            row["differ"] = 0  # the merge rounded once
    return row


Pair = tuple[Tensor, Tensor]


def _at_scales(x: Tensor, y: Tensor, of_x: Tensor | None, of_y: Tensor | None) -> Pair | None:
    """Return both tensors as values, if both are codes, or as the codes of the one that is."""
    if of_x is not None and of_y is not None:
        return x.float() * of_x, y.float() * of_y
    if of_y is not None:
        return _encoded(x, of_y, y), y
    if of_x is not None:
        return x, _encoded(y, of_x, x)
    return None


def _encoded(x: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
    """Return the codes that are nearest to values at given scales: those that are there, where
    roundings of the values and of the division decide.
    """
    slack = SLACK + unit_of(x.dtype)
    nearest = []
    for factor in (1.0, 1.0 - slack, 1.0 + slack):
        values = x.float() * factor / scale
        if codes.dtype.is_floating_point:
            largest = torch.finfo(codes.dtype).max
            nearest.append(values.clamp(-largest, largest).to(codes.dtype).float())
        else:
            limits = torch.iinfo(codes.dtype)
            nearest.append(values.round().clamp(limits.min, limits.max))
    there = codes.float()
    is_near = (nearest[1] == there) | (nearest[2] == there)
    return torch.where(is_near, there, nearest[0]).to(codes.dtype)


def _on_grids(x: Tensor, y: Tensor) -> Pair | None:
    """Return both tensors, equal within half a gap of the one that holds few values in each block, as
    weights that were quantized and decoded.
    """
    for values, grid in ((x, y), (y, x)):
        if (
            grid.ndim != 2
            or grid.shape[1] % BLOCK
            or grid.dtype not in (torch.float32, torch.bfloat16)
        ):
            continue
        blocks = grid.float().view(-1, BLOCK)
        levels = (blocks.sort(1).values.diff(dim=1) > 0).sum(1) + 1
        if not 2 < float(levels.float().mean()) <= MOST_LEVELS:
            continue
        off = (values.float() - grid.float()).abs().view(-1, BLOCK)
        is_near = torch.cat(
            [*map(_is_near, blocks.split(CHUNK // BLOCK), off.split(CHUNK // BLOCK))]
        )
        near = torch.where(is_near.view_as(grid), grid.float(), values.float())
        return (near, grid.float()) if grid is y else (grid.float(), near)
    return None


def _is_near(blocks: Tensor, off: Tensor) -> Tensor:
    """Return whether values lie within half the gap to the next level, on the wider side."""
    gaps = blocks[:, None, :] - blocks[:, :, None]
    above = torch.where(gaps > 0, gaps, math.inf).amin(2)
    below = torch.where(gaps < 0, -gaps, math.inf).amin(2)
    gap = torch.maximum(above.nan_to_num(posinf=0.0), below.nan_to_num(posinf=0.0))
    return off <= gap * (0.5 + 2.0**-6)


def _difference(x: Tensor, y: Tensor) -> Row:
    """Return how far a tensor is from another one, and the multiple of that which is nearest."""
    sums = torch.zeros(3, dtype=torch.float64)
    differ = nonfinite = 0
    for first, second in zip(x.flatten().split(CHUNK), y.flatten().split(CHUNK), strict=True):
        a = first.to(second.device).double()  # which holds values of every format
        b = second.double()
        off = b - a
        sums += torch.stack([a @ a, a @ b, off @ off]).cpu()
        differ += int(((a != b) & ~(a.isnan() & b.isnan())).sum())
        nonfinite += int((~b.isfinite()).sum())
    square, product, distance = sums.tolist()
    change = 0.0
    if distance:
        change = math.sqrt(distance / square) if square else math.inf
    factor = product / square if square else 0.0
    return {"differ": differ, "nonfinite": nonfinite, "change": change, "factor": factor}


def _lines(rows: list[Row]) -> Iterator[str]:
    for dtype, count in Counter(row["dtype"] for row in rows).items():
        yield f"{counted(count, 'tensor')}: {dtype}"
    values = sum(row["values"] for row in rows)
    differing = [row for row in rows if row["differ"]]
    share = sum(row["differ"] for row in differing) / max(1, values)
    equal = f"{len(rows) - len(differing)} of {counted(len(rows), 'tensor')} are equal"
    yield f"weights: {share:.2%} of {counted(values, 'value')} differ; {equal}"
    ones = [row["name"] for row in rows if row["is_one"]]
    if ones:
        yield f"vectors that are exactly 1: {len(ones)}, {told(ones)}"
    if differing:
        keys = "values", "differ", "change", "factor", "nonfinite"
        shown = {"weights": "name", **dict(zip(keys, keys, strict=True))}
        yield from Table(differing[:MOST_ROWS], shown).plain().splitlines()


def _of_adapters(rows: list[Row]) -> Iterator[str]:
    """Yield how often the second model holds adapters more than the first."""
    for row in rows:
        times = row["adapter_times"] or 0.0
        if abs(times) > MOST_TIMES:
            words = f"adapters of {row['name']}: {times:+.3f} times more in the second"
            yield f"{words} (+1: merged twice, -1: missing)"
            return
