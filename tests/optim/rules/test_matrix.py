"""Matrix rules: against their formulas and other implementations, on degenerate matrices, and that
they learn.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.subspaces import leading_basis
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.torch_support import machine
from optim.pairs import narrow, parameters, step_along
from oracles import galore as oracle
from tensors import gaussian, peak_bytes, step_gradients, take_steps

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = pytest.mark.parametrize("rule", ["muon", "galore"])
SHAPES = [(6, 10), (7, 1), (4, 3, 5)]
# What each rule needs to come to a minimum of a small problem: subspaces of half the side, turned
# often.
SMALL = {
    "muon": {"adjust_lr_fn": "match_rms_adamw"},
    "galore": {"rank": 4, "update_proj_gap": 5, "scale": 1.0},
}


def make(rule: str, params: list[nn.Parameter], **options: Any) -> Optimizer:
    kind = getattr(optimizers, UPDATE_RULES[rule].optimizer)
    options = {"compile": False, **SMALL[rule], **options}
    return kind(params, **options)


def noise(shape: tuple[int, ...], step: int, scale: float = 0.01) -> Tensor:
    return gaussian(*shape, seed=100 + step, scale=scale)


def train(rule: str, weight: Tensor, steps: int, scale: float = 0.01, **options: Any):
    """Take some steps in float32 along noise."""
    parameter = nn.Parameter(weight.clone())
    optimizer = make(rule, [parameter], storage="float32", **options)
    for step in range(1, steps + 1):
        parameter.grad = noise(weight.shape, step, scale)
        optimizer.step()
    return optimizer, parameter


def relative(value: Tensor, reference: Any) -> float:
    exact = torch.as_tensor(np.asarray(reference), dtype=torch.float64)
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_twelve_steps_of_galore_agree_with_float64(shape):
    start = gaussian(*shape)
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    _, learned = train("galore", start, 12, **options)
    adam = oracle.Adam(1e-2, (0.9, 0.99), 1e-8)
    expert = oracle.GaLore(oracle.Subspace(adam, rank=4, gap=5, scale=1.0), 0.1)
    w = start.double().numpy()
    for step in range(1, 13):
        w = expert.step(w, noise(shape, step).double().numpy())
    assert relative(learned.detach() - start, w - start.double().numpy()) < 1e-4


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=["wide", "tall"])
def test_muon_is_torchs_but_for_the_rounding_of_bfloat16(shape, scale, nesterov):
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    options |= {"nesterov": nesterov, "adjust_lr_fn": scale}
    start = gaussian(*shape)
    theirs = nn.Parameter(start.clone())
    torch_muon = torch.optim.Muon([theirs], **options)
    for step in range(1, 11):
        theirs.grad = noise(shape, step)
        torch_muon.step()
    optimizer, ours = train("muon", start, 10, **options)
    assert relative(ours.detach() - start, theirs.detach() - start) < 0.02
    momentum = torch_muon.state[theirs]["momentum_buffer"]
    assert relative(optimizer.stored(ours, "momentum_buffer"), momentum) < 1e-6


@EVERY
def test_a_group_may_ask_for_adamw(rule):
    """As embeddings and heads do, which are matrices."""
    first, second = narrow(6, 4), narrow(6, 4)
    same = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "compile": False}
    take_steps(make(rule, [{"params": [first], "rule": "adamw"}], **same), range(3))
    take_steps(optimizers.AdamW([second], **same), range(3))
    assert torch.equal(first, second)


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_of_zeros_only_decays(rule, shape):
    weight = gaussian(*shape)
    for eps in (1e-8, 0.0):
        for start in (weight, torch.zeros(shape)):
            _, after = train(rule, start, 3, scale=0.0, lr=0.1, weight_decay=0.1, eps=eps)
            assert torch.allclose(after, start * 0.99**3, rtol=1e-6, atol=0)


def test_the_stored_weight_decays_not_the_visible_one():
    weight = narrow(4, 6)
    value = torch.full((4, 6), 1 + 2.0**-10)
    optimizer = make("muon", [weight], lr=1.0, weight_decay=0.5, storage="exact")
    optimizer.adopt({weight: value})
    step_along(optimizer, 0.0)
    assert torch.equal(optimizer.stored(weight), value / 2)


@EVERY
@pytest.mark.parametrize("storage", ["float32", "word", "states8"])
@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 10, 6), (1, 1, 4)], ids=str)
def test_a_stack_has_the_bits_of_its_matrices(rule, storage, shape):
    if rule == "muon" and storage == "states8":
        return  # refused
    (stack,) = parameters(storage, [shape])
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    # Random low bits are keyed by a tensor's name and places in it.
    options = {"storage": storage, "low_bits": "zero", "lr": 0.02, "weight_decay": 0.1}
    stacked, separate = make(rule, [stack], **options), make(rule, matrices, **options)
    for step in range(1, 7):
        stack.grad = noise(shape, step).to(stack.dtype)
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
def test_powers_of_two_on_the_gradients_change_no_bit(rule):
    start = gaussian(12, 20)
    _, unscaled = train(rule, start, 7, eps=0.0)
    _, scaled = train(rule, start, 7, scale=0.01 * 2.0**-20, eps=0.0)
    assert torch.equal(unscaled, scaled)


@EVERY
def test_a_matrix_rules_transient_memory(rule):
    """At most four float32 copies of the matrix, as the docstrings say, and five where bfloat16
    operands are widened.
    """
    weight = nn.Parameter(gaussian(256, 2048).bfloat16())
    options = {"rank": 32, "update_proj_gap": 200} if rule == "galore" else {}
    optimizer = make(rule, [weight], storage="word", audit_every=2, **options)
    for step in range(2):  # the second is audited
        weight.grad = step_gradients([weight], step)[0]
        peak = peak_bytes(optimizer.step)
    most = 4 if machine.multiplies("bfloat16") else 5
    assert peak / (4 * weight.numel()) <= most


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24), (3, 9000)], ids=str)
def test_the_basis_is_the_decompositions_with_its_signs_fixed(shape):
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
