"""A state of a matrix rule that has another shape than the weight: bases, and moments of coordinates.

Its values do not lie beside those of the weight, so they are not packed with it. It is a tensor of its own, in the same code
as the storage's moments, and of a sharded parameter every rank holds the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import bits_of, dither, half, quiet, random_bits
from narrowgauge.optim import codec
from narrowgauge.spec.storages import BFLOAT16, FLOAT32, STORAGES, Code, Storage, low_parts, width_alone

_MANTISSA = 0x7FFFFF


@dataclass(eq=False)
class ReplicatedState:
    """One state, rounded to the code of a moment.

    Args:
        storage: a row that has this state and no other.
        tensors: by the names under which they are saved, those of its parts, each of the state's shape, and of a code that is
            scaled by row ``…_bound``, the largest magnitude of each row, float32 ``[…, 1]``. Integers are saved as ``…_codes``: a
            distributed checkpoint that holds float32 values under the plain name, as before there were codes, is refused, and not
            cast to integers.
    """

    name: str
    storage: Storage
    tensors: dict[str, Tensor]

    @classmethod
    def zeros(
        cls, name: str, shape: Sequence[int], role: str | None, storage: Storage, device: torch.device
    ) -> ReplicatedState:
        """A state of zeros in the code that ``storage`` has for moments of a ``role``; ``None`` keeps it in float32."""
        row = (STORAGES["float32"] if role is None else storage).keeping(((name, role or "exp_avg"),))
        code = row.code(name)
        tensors = {
            _saved_as(part, code): torch.zeros(tuple(shape), dtype=_dtype(code), device=device)
            for part in (name, *low_parts(name, code))
        }
        if code.scaled:
            tensors[f"{name}_bound"] = torch.zeros((*shape[:-1], 1), dtype=torch.float32, device=device)
        return cls(name, row, tensors)

    @property
    def code(self) -> Code:
        return self.storage.code(self.name)

    @property
    def shape(self) -> torch.Size:
        return self.tensors[_saved_as(self.name, self.code)].shape

    def value(self) -> Tensor:
        """The float32 values; of a state that is stored in float32 its own memory."""
        return codec.read_state(self.storage, self._lane(self.tensors), self.name)

    def encoded(self, values: Tensor, seed: Tensor | None = None) -> dict[str, Tensor]:
        """Float32 values as they are stored; a code that rounds stochastically does so where there is a ``seed`` (0-d int32).

        The key of the random bits is a value's place and its mantissa, so that powers of two on all values change nothing.
        """
        value, code = quiet(values.float().contiguous()), self.code
        tensors: dict[str, Tensor] = {}
        if code.scaled:
            empty = value.new_zeros((*value.shape[:-1], 1))
            tensors[f"{self.name}_bound"] = value.abs().amax(-1, keepdim=True) if value.numel() else empty
        lane = self._lane({**self.tensors, **tensors})
        fields = codec.write_state(self.storage, lane, self.name, value, _addend(code, value, seed))
        for part, bits in fields.items():
            dtype = _dtype(code)
            tensors[_saved_as(part, code)] = bits.to(codec.INTEGER[dtype.itemsize * 8]).view(dtype)
        return tensors

    def put(self, values: Tensor, seed: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Store float32 values, unless ``skip`` (0-d bool): then no bit changes."""
        for part, new in self.encoded(values, seed).items():
            old = self.tensors[part]
            old.copy_(new if skip is None else torch.where(skip, old, new))

    def _lane(self, tensors: dict[str, Tensor]) -> codec.Lane:
        fields = {}
        for part in (self.name, *low_parts(self.name, self.code)):
            tensor = tensors[_saved_as(part, self.code)]
            fields[part] = tensor.view(codec.INTEGER[tensor.dtype.itemsize * 8]).to(torch.int32), 0
        bound = tensors.get(f"{self.name}_bound")
        scales = {} if bound is None else {self.name: codec.multipliers(self.code, bound)}
        word = fields[self.name][0]
        return codec.Lane(word, word, fields, scales)


def _dtype(code: Code) -> torch.dtype:
    """PyTorch's dtype of the same bits, where there is one: code that reads ``float32`` as values may rely on it."""
    return {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}.get(code) or codec.INTEGER[width_alone(code)]


def _saved_as(part: str, code: Code) -> str:
    return part if _dtype(code).is_floating_point else f"{part}_codes"


def _addend(code: Code, value: Tensor, seed: Tensor | None) -> Tensor | int:
    dropped = codec.dropped_bits(code)
    if seed is None or code.rounding != "stochastic":
        return half(dropped)
    place = torch.arange(value.numel(), dtype=torch.int32, device=value.device).view(value.shape)
    return dither(random_bits(place ^ (bits_of(value) & _MANTISSA), seed), 32 - dropped, dropped, dropped)
