"""A NaN is stored as the same words whatever its sign and payload, which differ between processors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from covering import exhaustive
from narrowgauge.numerics.block_codes import BLOCK_CODES, BlockCode
from narrowgauge.optim import codec
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import Storage
from optim.scenarios import CUT, parameters, visible_dtype
from tensors import bits, gaussian

PAYLOADS = {
    torch.float32: (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FFF0000),
    torch.bfloat16: (0x7FC0, 0x7F81, 0x7FFF, 0x7FF8),
    torch.float16: (0x7E00, 0x7C01, 0x7FFF, 0x7F00),
}
"""Of positive NaNs: the quiet one, the least, all ones, many."""


def nans(dtype: torch.dtype) -> list[Tensor]:
    """0-d NaNs of both signs: the first is the quiet one, the second x86's own."""
    integer, sign = (torch.int32, 1 << 31) if dtype is torch.float32 else (torch.int16, 1 << 15)
    patterns = [pattern - negative for pattern in PAYLOADS[dtype] for negative in (0, sign)]
    return [torch.tensor(pattern, dtype=integer).view(dtype) for pattern in patterns]


def words_after(optimizer: ng.Optimizer, parameter: Tensor) -> list[Tensor]:
    """The bits of all that is stored."""
    state = optimizer.state_dict()["state"][0]
    return [bits(parameter).clone(), *(bits(value).clone() for value in state.values() if isinstance(value, Tensor))]


def assert_alike(results: Sequence[Sequence[Tensor]]) -> None:
    for result in results[1:]:
        assert len(result) == len(results[0])
        differing = [place for place, pair in enumerate(zip(result, results[0], strict=True)) if not torch.equal(*pair)]
        assert not differing


def stepped(storage: Storage, nan: Tensor, *, gradient: bool, weight: bool) -> tuple[ng.AdamW, Tensor]:
    """Three steps, with NaNs in the second one's gradient, or written into the weight before it."""
    (parameter,) = parameters(storage, [(6, 20)])
    optimizer = ng.AdamW([parameter], lr=1e-2, storage=storage, compile=False, audit_every=0)
    for step in range(3):
        parameter.grad = gaussian(6, 20, seed=step, scale=0.01, dtype=parameter.dtype)
        if step == 1:
            for target in [parameter.grad] * gradient + [parameter.detach()] * weight:
                target[1:4:2, 3:20:4] = nan
        optimizer.step()
    return optimizer, parameter


@exhaustive("storage", CUT.values())
@pytest.mark.parametrize("weight", [False, True])
def test_what_a_step_makes_of_a_nan_is_stored_alike(storage: Storage, weight: bool) -> None:
    kinds = nans(visible_dtype(storage))
    assert_alike([words_after(*stepped(storage, nan, gradient=True, weight=weight)) for nan in kinds])


@exhaustive("storage", [storage for storage in CUT.values() if storage.visible != "float16"])
def test_a_nan_that_was_written_into_a_weight_is_stored_alike(storage: Storage) -> None:
    """The weight alone: its moments stay numbers, whose random bits are a hash of the weight's. Float16 is read as a number."""
    results = []
    for nan in nans(visible_dtype(storage)):
        optimizer, parameter = stepped(storage, nan, gradient=False, weight=True)
        results.append([bits(parameter), bits(optimizer.stored(parameter, "weight"))])
    assert_alike([[found[1:4:2, 3:20:4] for found in result] for result in results])


@exhaustive("storage", CUT.values())
def test_a_step_of_nans_leaves_one_kind_of_words(storage: Storage) -> None:
    """Weights, gradients and those states that are floats, as they lie in a kernel's words."""
    definition = StepKernel(ADAMW, storage, compile=False).define(torch.device("cpu"), False)
    kinds = [visible_dtype(storage)] * (2 * codec.num_parts(storage))
    for plane in codec.planes(storage):
        kinds += [plane.dtype] * codec.num_tensors(storage, plane.bits)
    results = []
    for place in range(len(nans(torch.float32))):
        arguments = definition.in_place(definition.example)
        for number, (dtype, words) in enumerate(zip(kinds, arguments, strict=False)):
            if dtype.is_floating_point:
                every = nans(dtype)
                bits(words.view(dtype)).copy_(bits(every[(place + number) % len(every)]))
        definition.function(*arguments)
        results.append([arguments[number] for number in definition.outputs])
    assert_alike(results)
    for words in results[0][: codec.num_parts(storage)]:
        seen = words.view(visible_dtype(storage))
        assert not seen.signbit().any() and (storage.weight.is_window or not seen.isfinite().any())


@exhaustive("code", BLOCK_CODES.values())
def test_a_nan_in_a_compressed_gradient_travels_alike(code: BlockCode) -> None:
    results = []
    for nan in nans(torch.float32):
        values = gaussian(700)
        values[300] = nan
        results.append([code.encode(values, key=5)])
    assert_alike(results)
