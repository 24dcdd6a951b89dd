"""How other libraries store the weight and the moments of a parameter, and what those mean in float32.

One row per library, tried in order: the first whose mark is in a parameter's state or in the options of its group decodes it.

=====================  ===================================================================================================
torch.optim            float32 or narrower moments, as they are
bitsandbytes           8-bit codes of a map, times the largest value of each block
torchao                tensors of its own class: 8-bit or 4-bit codes of a map, or float8, times a scale per block
FlashOptim             int8 codes, softsign or square root, times a float16 scale per 32; a weight corrected by error bits
optimi                 moments divided by their bias correction already; a weight and what Kahan summation still owes it
FusedAdam              TransformerEngine's and Apex's: one step for a group; of TransformerEngine float32 masters, or the 16 bits
                       that the bfloat16 weight lacks (Apex keeps its masters outside of its ``state_dict``)
=====================  ===================================================================================================

Decoding is exact in float32 unless the row says what rounds. What a library lost before it saved is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.conversion.files import InertTensor
from narrowgauge.errors import DataError
from narrowgauge.spec.storages import STATE_NAMES

Entry = Mapping[str, Any]
# Values per scale of bitsandbytes, in memory order: from version 0.44 on, and before it.
_BLOCK_SIZES = (256, 2048)
_8BIT = "__bnb_optimizer_quant_state__"
_FLASH_GROUP = 32


@dataclass(frozen=True)
class Encoding:
    """One library's way to store the state of Adam.

    Args:
        origin: the name in the report.
        marks: whether a state and the options of its group are this library's.
        keys: what a state may contain; anything else is refused, since it would be lost.
        moment: decodes one moment: the state, its kind, the options, whose it is.
        weight: the float32 weight from the state, the visible one and the options; ``None``: the visible one is all.
    """

    origin: str
    marks: Callable[[Entry, Entry], bool]
    keys: frozenset[str]
    moment: Callable[[Entry, str, Entry, str], Tensor]
    weight: Callable[[Entry, Tensor, Entry], Tensor] | None = None


def unnested(entry: Entry) -> dict[str, Any]:
    """A parameter's state; bitsandbytes nests most of it one level deeper, where FSDP does not touch it."""
    return {**{key: value for key, value in entry.items() if key != _8BIT}, **entry.get(_8BIT, {})}


def encoding_of(entry: Entry, group: Entry) -> Encoding:
    return next(row for row in ENCODINGS if row.marks(entry, group))


def decoded(
    row: Encoding, entry: Entry, group: Entry, weight: Tensor, name: str, where: object
) -> tuple[Tensor, dict[str, Any]]:
    """The weight of a parameter, and its float32 moments and step count.

    Args:
        entry: its state, not nested.
        group: the options of its group.
        weight: as the model sees it.
        name, where: parameter and file, for errors.
    Returns:
        The weight, in float32 where the state knows more of it than the model, and ``{"step", "exp_avg", "exp_avg_sq"}``.
    """
    whose = f"'{name}' in {where}"
    if odd := sorted(key for key in entry if key not in row.keys):
        raise DataError(
            f"the state of {whose} contains '{odd[0]}'.",
            f"Only states of Adam and AdamW can be converted: {' and '.join(STATE_NAMES)}.",
        )
    # FusedAdam and optimi count the steps of a group, not of a parameter.
    step = entry.get("step", group.get("step"))
    if step is None:
        raise DataError(f"the state of {whose} lacks 'step'.", "Only states of Adam and AdamW can be converted.")
    moments = {kind: row.moment(entry, kind, group, whose).contiguous() for kind in STATE_NAMES}
    for value in moments.values():
        if value.shape != weight.shape:
            raise DataError(
                f"'{name}' has shape {tuple(weight.shape)}, and its state in {where} has shape {tuple(value.shape)}.",
                "Give weights and state of one model.",
            )
    kept = weight if row.weight is None else row.weight(entry, weight, group)
    return kept, {"step": int(step), **moments}


def shape_of(entry: Entry) -> torch.Size:
    entry = unnested(entry)
    keys = ("exp_avg", "state1", "exp_avg::quantized")
    first = next((entry[key] for key in keys if entry.get(key) is not None), None)
    if first is None:  # ours, packed: any plane except the scales of rows
        planes = [t for name, t in entry.items() if isinstance(t, Tensor) and name != "step" and "_bound" not in name]
        first = planes[0] if planes else torch.empty(0, dtype=torch.float32)
    shape: torch.Size = first.shape
    return shape


def _plain(entry: Entry, kind: str, _group: Entry, whose: str) -> Tensor:
    if kind not in entry:
        raise DataError(
            f"the state of {whose} lacks '{kind}'.",
            f"Only states of Adam and AdamW can be converted: {' and '.join(STATE_NAMES)}.",
        )
    value: Tensor = entry[kind]
    return value.float()


# ── bitsandbytes and torchao ────────────────────────────────────────────────────────────────────────────────────────────


def _blockwise(values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Values times the scale of their block; blocks are neighbours in memory."""
    flat: Tensor = values.flatten() * scales.float().repeat_interleave(size)[: values.numel()]
    return flat


def _bitsandbytes(entry: Entry, kind: str, _group: Entry, whose: str) -> Tensor:
    """The value of each code in the map, times the absmax of its block.

    Source: Dettmers et al., ICLR 2022 (2110.02861), block-wise dynamic quantization.
    """
    part = str(1 + STATE_NAMES.index(kind))
    if f"state{part}" not in entry:
        raise DataError(f"the state of {whose} lacks 'state{part}'.", "Only states of Adam and AdamW can be converted.")
    codes: Tensor = entry[f"state{part}"]
    if codes.dtype is not torch.uint8:
        return codes.float()  # small tensors stay in float32
    table, scales = entry.get(f"qmap{part}"), entry.get(f"absmax{part}")
    if table is None or scales is None:
        raise DataError(
            f"the 8-bit state of {whose} is not block-wise.", "bitsandbytes writes it with block_wise=True."
        )
    size = next((size for size in _BLOCK_SIZES if -(-codes.numel() // size) == scales.numel()), 0)
    if not size:
        raise DataError(
            f"the 8-bit state of {whose} has {scales.numel()} scales for {codes.numel()} values; blocks of "
            f"{' or '.join(map(str, _BLOCK_SIZES))} values are supported."
        )
    return _blockwise(table.float()[codes.flatten().long()], scales, size).reshape(codes.shape)


def _torchao(entry: Entry, kind: str, group: Entry, whose: str) -> Tensor:
    """Codes of a map (8 bits, or two 4-bit codes to a byte, the first in the upper half) or float8, times a scale per block.

    Source: torchao 0.18, ``optim/subclass_8bit.py``, ``subclass_4bit.py``, ``subclass_fp8.py``, ``quant_utils.py``.
    """
    value = entry.get(kind)
    if not isinstance(value, InertTensor):  # of fewer than 4096 values, or of no whole number of blocks: not quantized
        return _plain(entry, kind, group, whose)
    parts = value.__dict__
    codes, scales = parts["codes"], parts["scale"]
    if codes.dtype is torch.float8_e4m3fn:
        values = codes.float()
    elif type(value).__name__.endswith("4bit"):
        values = parts["qmap"][torch.stack([codes >> 4, codes & 15], -1).flatten().long()]
    else:
        values = parts["qmap"][codes.flatten().long()]
    return _blockwise(values, scales, values.numel() // scales.numel()).reshape(value.shape)


# ── FlashOptim ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _flashoptim(entry: Entry, kind: str, group: Entry, whose: str) -> Tensor:
    """Codes over their largest, softsign undone for the first moment, times a float16 scale per 32, squared for the second.

    Source: flashoptim 0.1.4, ``_triton_dequantize_kernel``, whose values these are bit for bit.
    """
    codes, scales = entry.get(f"{kind}::quantized"), entry.get(f"{kind}::scales")
    if codes is None or scales is None:
        return _plain(entry, kind, group, whose)
    # The bits of float16 as bfloat16, where the weight is: torch would round them on loading otherwise.
    scales = scales.view(torch.float16) if scales.dtype is torch.bfloat16 else scales
    is_first = kind == STATE_NAMES[0]
    values = codes.float() / (127.0 if is_first else 255.0)
    values = values / (2.0 - values.abs()) if is_first else values
    values = _blockwise(values, scales, _FLASH_GROUP).reshape(codes.shape)
    return values if is_first else values * values


def _flashoptim_weight(entry: Entry, weight: Tensor, group: Entry) -> Tensor:
    """The visible weight plus its error bits, a fraction of half the distance to its neighbour.

    Source: flashoptim 0.1.4, ``_apply_error_correction`` and ``_state_dict_for_param``: 8 bits are saved as numbers of the
    weight's dtype, 16 bits as its bits.
    """
    errors: Tensor | None = entry.get("error_bits")
    if errors is None or weight.dtype is torch.float32:
        return weight
    mantissa, least = (7, -126) if weight.dtype is torch.bfloat16 else (10, -14)
    is_wide = int(group["master_bytewidth"]) == 4
    errors = errors.view(torch.int16) if is_wide and errors.is_floating_point() else errors
    # frexp's exponent is one above the unbiased one; zero and subnormals have that of the smallest normal number.
    exponent = (torch.frexp(weight.float()).exponent - 1).clamp(min=least)
    exponent = torch.where(weight == 0, torch.full_like(exponent, least), exponent)
    power = (exponent - mantissa - 1).float()
    half = torch.floor(power / 2)
    fraction = errors.float() / (32767.0 if is_wide else 127.0)
    return weight.float() + fraction * torch.exp2(half) * torch.exp2(power - half)


# ── optimi ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _optimi(entry: Entry, kind: str, group: Entry, whose: str) -> Tensor:
    """The moment times its bias correction: optimi's betas are debiased, so what it stores is the corrected moment.

    The product is rounded to float32 once.

    Source: optimi 0.3.3, ``debias_beta`` and ``_single_param_adam``.
    """
    beta = group["beta1" if kind == STATE_NAMES[0] else "beta2"]
    correction = 1.0 - float(beta) ** int(entry.get("step", group.get("step", 0)))
    return (_plain(entry, kind, group, whose).double() * correction).float()


def _optimi_weight(entry: Entry, weight: Tensor, _group: Entry) -> Tensor:
    """The weight plus what Kahan summation still owes it, rounded to float32 once."""
    owed: Tensor | None = entry.get("kahan_comp")
    if owed is None or owed.shape != weight.shape or not owed.is_floating_point():
        return weight  # float32 weights have none, and one byte stands for it under Triton
    return (weight.double() + owed.double()).float()


# ── TransformerEngine and Apex ──────────────────────────────────────────────────────────────────────────────────────────


def _fused_weight(entry: Entry, weight: Tensor, _group: Entry) -> Tensor:
    """The float32 master, or the bfloat16 weight joined with the 16 bits that it lacks, as our ``exact`` keeps them.

    Source: TransformerEngine, ``multi_tensor/adam.cu``, ``AdamFunctorMasterParamRemainder``: the weight was rounded up where
    the remainder is negative.
    """
    master: Tensor | None = entry.get("master_param")
    if master is None:
        return weight
    if master.dtype is not torch.int16:
        return master.float()
    upper = weight.to(torch.bfloat16).contiguous().view(torch.int16).int() - (master < 0).int()
    return ((upper << 16) | (master.int() & 0xFFFF)).view(torch.float32)


_ADAM = frozenset({"step", *STATE_NAMES})
_QUANTIZED = frozenset(f"{kind}::{part}" for kind in STATE_NAMES for part in ("quantized", "scales"))
ENCODINGS: tuple[Encoding, ...] = (
    Encoding(
        "bitsandbytes",
        lambda entry, group: "state1" in entry,
        frozenset({"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}),
        _bitsandbytes,
    ),
    Encoding("torchao", lambda entry, group: any(isinstance(entry.get(k), InertTensor) for k in STATE_NAMES), _ADAM, _torchao),
    Encoding(
        "FlashOptim",
        lambda entry, group: "master_bytewidth" in group,
        _ADAM | _QUANTIZED | {"error_bits"},
        _flashoptim,
        _flashoptim_weight,
    ),
    Encoding("optimi", lambda entry, group: "beta2" in group, _ADAM | {"kahan_comp"}, _optimi, _optimi_weight),
    Encoding(
        "FusedAdam",
        lambda entry, group: "bias_correction" in group,
        _ADAM | {"master_param"},
        _plain,
        _fused_weight,
    ),
    Encoding("torch.optim", lambda entry, group: True, _ADAM, _plain),
)  # fmt: skip
