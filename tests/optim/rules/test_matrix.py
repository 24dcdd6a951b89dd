"""Matrix rules: against their formulas and other implementations, on degenerate matrices, and that
they learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import (
    GALORE,
    MUON,
    MatrixRule,
)
from narrowgauge.optim.rules.subspaces import leading_basis
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.torch_support import machine
from oracles import galore as oracle
from tensors import gaussian, peak_bytes, step_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

MATRIX_RULES = {rule.name: rule for rule in (MUON, GALORE)}
EVERY = pytest.mark.parametrize("rule", MATRIX_RULES.values(), ids=MATRIX_RULES)
SHAPES = [(6, 10), (7, 1), (4, 3, 5)]
# What each rule needs to come to a minimum of a small problem: subspaces of half the side, turned
# often.
SMALL: dict[str, dict[str, Any]] = {
    "muon": {"adjust_lr_fn": "match_rms_adamw"},
    "galore": {"rank": 4, "update_proj_gap": 5, "scale": 1.0},
}


def options_of(rule: MatrixRule, **options: Any) -> dict[str, Any]:
    make = getattr(optimizers, UPDATE_RULES[rule.name].optimizer)
    defaults = make(
        [nn.Parameter(torch.zeros(2, 2, dtype=torch.float32))], storage="float32"
    ).defaults
    return {**defaults, **SMALL[rule.name], **options}


def train(
    rule: MatrixRule,
    weight: Tensor,
    gradient: Callable[[Tensor, int], Tensor],
    steps: int,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight and states after some steps in float32."""
    group = options_of(rule, **options)
    parameter = nn.Parameter(weight.clone())
    optimizer = Optimizer([parameter], rule, group, storage="float32", compile=False)
    for step in range(1, steps + 1):
        parameter.grad = gradient(parameter.detach(), step)
        optimizer.step()
    names = optimizer.local_state(parameter).names  # type: ignore[union-attr]
    return parameter.detach(), {name: optimizer.stored(parameter, name) for name in names}


def noise(shape: tuple[int, ...]) -> Callable[[Tensor, int], Tensor]:
    return lambda weight, step: gaussian(*shape, seed=100 + step, scale=0.01)


def relative(value: Tensor, reference: Any) -> float:
    exact = torch.as_tensor(np.asarray(reference), dtype=torch.float64)
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_twelve_steps_of_galore_agree_with_float64(shape: tuple[int, int]) -> None:
    start = gaussian(*shape)
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    learned, _ = train(GALORE, start, noise(shape), 12, **options)
    adam = oracle.Adam(1e-2, (0.9, 0.99), 1e-8)
    expert = oracle.GaLore(oracle.Subspace(adam, rank=4, gap=5, scale=1.0), 0.1)
    w = start.double().numpy()
    for step in range(1, 13):
        w = expert.step(w, gaussian(*shape, seed=100 + step, scale=0.01).double().numpy())
    assert relative(learned - start, w - start.double().numpy()) < 1e-4


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=["wide", "tall"])
def test_muon_is_torchs_but_for_the_rounding_of_bfloat16(
    shape: tuple[int, int], scale: str, nesterov: bool
) -> None:
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    options |= {"nesterov": nesterov, "adjust_lr_fn": scale}
    start = gaussian(*shape)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], **options)
    for step in range(1, 11):
        theirs.grad = noise(shape)(theirs, step)
        optimizer.step()
    ours, states = train(MUON, start, noise(shape), 10, **options)
    assert relative(ours - start, theirs.detach() - start) < 0.02
    momentum = optimizer.state[theirs]["momentum_buffer"]
    assert relative(states["momentum_buffer"], momentum) < 1e-6


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_of_zeros_only_decays(rule: MatrixRule, shape: tuple[int, ...]) -> None:
    weight = gaussian(*shape)
    for eps in (1e-8, 0.0):
        for scaled in (weight, torch.zeros(shape)):
            after, _ = train(
                rule, scaled, lambda w, _: torch.zeros_like(w), 3, lr=0.1, weight_decay=0.1, eps=eps
            )
            assert torch.allclose(after, scaled * 0.99**3, rtol=1e-6, atol=0)


def test_the_stored_weight_decays_not_the_visible_one() -> None:
    weight = nn.Parameter(torch.ones(4, 6).bfloat16())
    value = torch.full((4, 6), 1 + 2.0**-10)
    optimizer = optimizers.Muon([weight], lr=1.0, weight_decay=0.5, storage="exact", compile=False)
    optimizer.adopt({weight: value})
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.stored(weight), value / 2)


@EVERY
@pytest.mark.parametrize("storage", ["float32", "word", "states8"])
@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 10, 6), (1, 1, 4)], ids=str)
def test_a_stack_has_the_bits_of_its_matrices(
    rule: MatrixRule, storage: str, shape: tuple[int, ...]
) -> None:
    if rule is MUON and storage == "states8":
        return  # refused
    start = gaussian(*shape).bfloat16().to(getattr(torch, STORAGES[storage].visible))
    stack = nn.Parameter(start.clone())
    matrices = [nn.Parameter(matrix.clone()) for matrix in start]
    # Random low bits are keyed by a tensor's name and places in it.
    options: dict[str, Any] = {"storage": storage, "compile": False, "low_bits": "zero"}
    group = options_of(rule, lr=0.02, weight_decay=0.1)
    stacked = Optimizer([stack], rule, dict(group), **options)
    separate = Optimizer(matrices, rule, dict(group), **options)
    for step in range(1, 7):
        stack.grad = noise(shape)(start, step).to(start.dtype)
        for matrix, gradient in zip(matrices, stack.grad, strict=True):
            matrix.grad = gradient.clone()
        stacked.step()
        separate.step()
    assert torch.equal(stack, torch.stack([matrix.detach() for matrix in matrices]))
    (saved,) = stacked.state_dict()["state"].values()
    entries = separate.state_dict()["state"].values()
    for name in saved.keys() - {"step", "window"}:
        assert torch.equal(saved[name], torch.stack([entry[name] for entry in entries])), name


@EVERY
def test_powers_of_two_on_the_gradients_change_no_bit(rule: MatrixRule) -> None:
    shape = (12, 20)
    unscaled, _ = train(rule, gaussian(*shape), noise(shape), 7, eps=0.0)
    scaled, _ = train(
        rule, gaussian(*shape), lambda w, step: noise(shape)(w, step) * 2.0**-20, 7, eps=0.0
    )
    assert torch.equal(unscaled, scaled)


@pytest.mark.parametrize("rule", ["Muon", "GaLore"])
def test_a_matrix_rules_transient_memory(rule: str) -> None:
    """At most four float32 copies of the matrix, as the docstrings say. Where a processor has vectors
    of 512 bits and no bfloat16, PyTorch multiplies copies of its own.
    """
    weight = nn.Parameter(gaussian(256, 2048).bfloat16())
    options = {"rank": 32} if rule == "GaLore" else {}
    make = getattr(optimizers, rule)
    optimizer = make([weight], storage="word", compile=False, audit_every=2, **options)
    for step in range(2):  # the second is audited
        weight.grad = step_gradients([weight], step)[0]
        peak = peak_bytes(optimizer.step)
    sets = machine.instruction_sets()
    multiplies_copies = "avx512f" in sets and "avx512_bf16" not in sets
    assert peak / (4 * weight.numel()) <= (6 if multiplies_copies else 4)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24), (3, 9000)], ids=str)
def test_the_basis_is_the_decompositions_with_its_signs_fixed(shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    rank = min(3, *shape)
    basis = leading_basis(x, rank)
    u, _, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    singular_vectors = torch.from_numpy(
        (vt[:rank].T if shape[0] >= shape[1] else u[:, :rank]).copy()
    )
    signs = (basis.double() * singular_vectors).sum(0).sign()
    assert float((basis.double() - singular_vectors * signs).abs().max()) < 1e-6
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(leading_basis(-x, rank), basis)
    assert torch.equal(leading_basis(x * 2.0**-60, rank), basis)  # its squares are below float32
