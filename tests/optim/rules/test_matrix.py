"""Matrix rules: against their formulas and other implementations, on degenerate matrices, and that they learn."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from narrowgauge.optim.rules.matrix import (
    ADAFACTOR,
    GALORE,
    GRADNORM_LORP,
    MATRIX_RULES,
    MUON,
    NS_COEFFICIENTS,
    MatrixRule,
    orthogonalise,
    state_bytes,
)
from narrowgauge.optim.rules.subspaces import PROJECTIONS, leading_basis, longer_basis
from narrowgauge.spec.storages import STORAGES
from oracles import matrix_rules as oracle
from tensors import gaussian

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = pytest.mark.parametrize("rule", MATRIX_RULES.values(), ids=MATRIX_RULES)
SHAPES = [(6, 10), (10, 6), (8, 8), (1, 7), (7, 1), (1, 1), (4, 3, 5)]
# What each rule needs to come to a minimum of a small problem: subspaces of half the side, turned often.
SMALL: dict[str, dict[str, Any]] = {
    "muon": {"ns_dtype": "float32", "adjust_lr_fn": "match_rms_adamw"},
    "adafactor": {"lr": 1e-3, "weight_decay": 0.01, "scale_parameter": False, "relative_step": False},
    "galore": {"rank": 4, "update_proj_gap": 5, "scale": 1.0},
    "gradnorm_lorp": {"rank": 4, "update_proj_gap": 5},
}


def options_of(rule: MatrixRule, **options: Any) -> dict[str, Any]:
    return {**rule.defaults, **SMALL[rule.name], **options}


def fresh(rule: MatrixRule, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.zeros(kept.shape) for name, kept in rule.states(shape, options).items()}


def train(
    rule: MatrixRule, weight: Tensor, gradient: Callable[[Tensor, int], Tensor], steps: int, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight and states after some steps, with a learning rate that falls to zero in a line if ``decaying``."""
    decaying = options.pop("decaying", False)
    group = options_of(rule, **options)
    states, lr = fresh(rule, tuple(weight.shape), group), group["lr"]
    for step in range(1, steps + 1):
        group["lr"] = lr * (1 - step / (steps + 1)) if decaying else lr
        change, states = rule.update(weight, gradient(weight, step), states, group, step)
        weight = weight + change
    return weight, states


def noise(shape: tuple[int, ...]) -> Callable[[Tensor, int], Tensor]:
    return lambda weight, step: gaussian(*shape, seed=100 + step, scale=0.01)


def relative(value: Tensor, wanted: Any) -> float:
    exact = torch.as_tensor(np.asarray(wanted), dtype=torch.float64)
    return float((value.double() - exact).norm() / exact.norm())


# ── they learn ──────────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
@pytest.mark.parametrize("start", ["gaussian", "zeros"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_learns_a_parabola(rule: MatrixRule, start: str, shape: tuple[int, int]) -> None:
    target, curvature = gaussian(*shape, seed=1), 0.5 + gaussian(*shape, seed=2).abs()
    weight = gaussian(*shape, seed=3) if start == "gaussian" else torch.zeros(shape)
    learned, _ = train(
        rule, weight, lambda w, _: curvature * (w - target), 400, lr=0.1, weight_decay=0.0, decaying=True
    )
    assert float((learned - target).norm() / (weight - target).norm()) < 0.01


@EVERY
def test_learns_a_regression_from_batches(rule: MatrixRule) -> None:
    truth, inputs = gaussian(5, 8, seed=1), gaussian(256, 8, seed=2)

    def gradient(w: Tensor, step: int) -> Tensor:
        x = inputs[torch.arange(32 * step, 32 * step + 32) % 256]
        return (x @ (w - truth).mT).mT @ x / 32

    learned, _ = train(rule, gaussian(5, 8, seed=3), gradient, 400, lr=0.1, weight_decay=0.0, decaying=True)
    assert float((learned - truth).norm() / truth.norm()) < 0.01


def test_the_released_gradnorm_lorp_changes_nothing_and_ours_trains() -> None:
    shape = (6, 10)
    target, start = gaussian(*shape, seed=1), gaussian(*shape, seed=2)
    errors = {}
    for reconstruct in (False, True):
        subspace = oracle.Subspace(oracle.Adam(0.05, (0.9, 0.999), 1e-8), rank=4, gap=5, scale=1.0)
        released = oracle.ReleasedWeightNormalised(subspace, oracle.Adam(0.05, (0.9, 0.999), 1e-8), reconstruct)
        w = start.double().numpy()
        for _ in range(100):
            w = released.step(w, w - target.double().numpy())
        errors[reconstruct] = relative(torch.from_numpy(w), target)
        moved = released.direction * released.length - start.double().numpy()
        assert np.abs(moved).max() > 0.1  # its copies do learn
        if not reconstruct:
            assert np.array_equal(w, start.double().numpy())
    ours, _ = train(GRADNORM_LORP, start, lambda w, _: w - target, 100, lr=0.05, weight_decay=0.0)
    assert errors[True] < 0.5 < 1.0 < errors[False]
    assert relative(ours, target) < 0.5


# ── against formulas and other implementations ──────────────────────────────────────────────────────────────────────


def oracles(name: str, lr: float, decay: float, *, eps: float, both: bool = False) -> Any:
    subspace = oracle.Subspace(oracle.Adam(lr, (0.9, 0.99), eps), rank=4, gap=5, scale=1.0, both=both)
    return {
        "muon": oracle.Muon(lr, decay, moonlight=True),
        "galore": oracle.GaLore(subspace, decay),
        "gradnorm_lorp": oracle.WeightNormalised(subspace, oracle.Adam(lr, (0.9, 0.99), eps), decay),
    }[name]


@pytest.mark.parametrize(
    "name, proj_type",
    [("muon", "std"), *((name, kind) for name in ("galore", "gradnorm_lorp") for kind in PROJECTIONS)],
)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=["wide", "tall", "square"])
def test_twelve_steps_agree_with_float64(name: str, proj_type: str, shape: tuple[int, int]) -> None:
    start, rule = gaussian(*shape), MATRIX_RULES[name]
    # In bases of both sides the first gradient is diagonal, and what rounding leaves beside it must stay far below epsilon.
    eps = 1e-5 if proj_type == "full" else 1e-8
    more = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": eps, "proj_type": proj_type}
    learned, _ = train(rule, start, noise(shape), 12, **more)
    expert, w = oracles(name, 1e-2, 0.1, eps=eps, both=proj_type == "full"), start.double().numpy()
    for step in range(1, 13):
        w = expert.step(w, gaussian(*shape, seed=100 + step, scale=0.01).double().numpy())
    assert relative(learned - start, w - start.double().numpy()) < 1e-4


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=["wide", "tall"])
def test_muon_is_torchs_but_for_the_rounding_of_bfloat16(shape: tuple[int, int], scale: str, nesterov: bool) -> None:
    same = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": scale}
    start = gaussian(*shape)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], **same)
    for step in range(1, 11):
        theirs.grad = noise(shape)(theirs, step)
        optimizer.step()
    for dtype in ("bfloat16", "float32"):
        ours, states = train(MUON, start, noise(shape), 10, ns_dtype=dtype, **same)
        assert relative(ours - start, theirs.detach() - start) < 0.02
        assert relative(states["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"]) < 1e-6


def restated(x: Tensor) -> Tensor:
    """The iteration of ``torch.optim.Muon``, operation for operation, in float32."""
    a, b, c = NS_COEFFICIENTS
    y = x.T if x.size(0) > x.size(1) else x
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if x.size(0) > x.size(1) else y


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (1, 9)], ids=["wide", "tall", "row"])
def test_orthogonalise_is_the_published_iteration_exactly_in_float32(shape: tuple[int, int]) -> None:
    x = gaussian(*shape).sign()  # its norm is a whole number, however it is summed
    assert torch.equal(orthogonalise(x, dtype=torch.float32), restated(x))
    assert relative(orthogonalise(x, dtype=torch.float32), oracle.newton_schulz(x.double().numpy())) < 1e-5


def test_adafactor_is_that_of_torch() -> None:
    """Its own reading: the rate is a bound on a relative step, and eps1 is far below these gradients."""
    shape, start = (12, 20), gaussian(12, 20)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adafactor([theirs], lr=0.3, eps=(1e-12, 1e-3), weight_decay=0.01)
    for step in range(1, 21):  # 1/sqrt(step) is above and below the rate
        theirs.grad = noise(shape)(theirs, step)
        optimizer.step()
    ours, states = train(
        ADAFACTOR, start, noise(shape), 20, lr=0.3, weight_decay=0.01, scale_parameter=True, relative_step=True
    )
    assert relative(ours - start, theirs.detach() - start) < 2e-5
    assert relative(states["exp_avg_sq_row"], optimizer.state[theirs]["row_var"][:, 0]) < 1e-5
    assert relative(states["exp_avg_sq_col"], optimizer.state[theirs]["col_var"][0]) < 1e-5


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("scaled", [False, True])
def test_adafactor_is_that_of_transformers(beta1: float | None, scaled: bool) -> None:
    shape, start = (12, 20), gaussian(12, 20, scale=0.0001 if scaled else 1.0)  # 1e-4 is below the second of eps
    theirs = torch.nn.Parameter(start.clone())
    optimizer = transformers.Adafactor(
        [theirs], lr=1e-2, beta1=beta1, clip_threshold=0.5, scale_parameter=scaled, relative_step=False
    )
    for step in range(1, 21):
        theirs.grad = noise(shape)(theirs, step)
        optimizer.step()
    ours, states = train(
        ADAFACTOR, start, noise(shape), 20,
        lr=1e-2, beta1=beta1, clip_threshold=0.5, scale_parameter=scaled, weight_decay=0.0,
    )  # fmt: skip
    assert relative(ours - start, theirs.detach() - start) < 2e-5
    assert ("exp_avg" in states) == (beta1 is not None)


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_the_ones_that_were_announced(rule: MatrixRule, shape: tuple[int, ...]) -> None:
    options = options_of(rule, rank=100)
    announced = rule.states(shape, options)
    _, states = train(rule, gaussian(*shape), noise(shape), 2, rank=100)
    assert {n: tuple(s.shape) for n, s in states.items()} == {n: k.shape for n, k in announced.items()}
    assert all(s.dtype is torch.float32 and s.isfinite().all() for s in states.values())
    assert all(k.shape == shape and k.role is not None for k in announced.values() if k.beside)
    kept = state_bytes(rule, shape, options, STORAGES["float32"])
    assert kept == sum(s.numel() * s.element_size() for s in states.values())


def test_states_with_a_role_cost_what_the_storage_says() -> None:
    shape = (64, 96)
    numbers = [state_bytes(MUON, shape, {}, STORAGES[name]) for name in ("float32", "split", "word")]
    assert numbers == [4 * 64 * 96, 2 * 64 * 96, 12 * 64 * 96 // 8]
    assert state_bytes(MUON, (3, 1), {}, STORAGES["word"]) == 5  # 36 bits
    assert state_bytes(ADAFACTOR, shape, {"beta1": 0.9}, STORAGES["word"]) == 12 * 64 * 96 // 8 + 4 * (64 + 96)
    values, longer = 8 * (64 + 2 * 96), {"rank": 8, "proj_type": "full"}
    assert state_bytes(GALORE, shape, {"rank": 8}, STORAGES["word"]) == 2 * values
    assert state_bytes(GALORE, shape, {"rank": 8}, STORAGES["states8"]) == values + 4 * (64 + 2 * 8)  # scales of rows
    assert state_bytes(GALORE, shape, longer, STORAGES["word"]) == 2 * (8 * (64 + 96) + 2 * 8 * 8)
    assert state_bytes(GRADNORM_LORP, shape, {"rank": 8}, STORAGES["float32"]) == 4 * (values + 2 * 96)


def test_bytes_at_a_quarter_of_the_side_are_those_of_the_page() -> None:
    found = {
        (kind, name): state_bytes(GALORE, (4096, 4096), {"rank": 1024, "proj_type": kind}, STORAGES[name]) / 4096**2
        for kind in PROJECTIONS
        for name in ("float32", "word", "compact", "states8")
    }
    assert [round(value, 2) for value in found.values()] == [3.0, 1.5, 0.75, 0.75, 2.5, 1.25, 0.63, 0.63]


@EVERY
def test_a_rule_can_be_pickled_and_copied(rule: MatrixRule) -> None:
    """Optimizers carry theirs along."""
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule


@EVERY
def test_defaults_also_serve_adamw(rule: MatrixRule) -> None:
    assert {"lr", "betas", "eps", "weight_decay"} <= rule.defaults.keys()


# ── degenerate matrices ─────────────────────────────────────────────────────────────────────────────────────────────


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_given_is_written_to(rule: MatrixRule, shape: tuple[int, ...]) -> None:
    _, states = train(rule, gaussian(*shape), noise(shape), 3)
    given = {"w": gaussian(*shape, seed=1), "g": gaussian(*shape, seed=2), **states}
    before = {name: value.clone() for name, value in given.items()}
    change, _ = rule.update(given["w"], given["g"], states, options_of(rule, update_proj_gap=3), 4)
    assert change.shape == shape and change.isfinite().all() and change.abs().max() > 0
    assert all(torch.equal(value, before[name]) for name, value in given.items())


@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_a_gradient_of_zeros_only_decays(rule: MatrixRule, shape: tuple[int, ...], eps: float) -> None:
    more = {"eps": (eps and 1e-30, 1e-3) if rule is ADAFACTOR else eps}
    weight = gaussian(*shape)
    for scaled in (weight, torch.zeros(shape)):
        after, _ = train(rule, scaled, lambda w, _: torch.zeros_like(w), 3, lr=0.1, weight_decay=0.1, **more)
        assert torch.allclose(after, scaled * 0.99**3, rtol=1e-6, atol=0)


@EVERY
def test_without_a_rate_there_is_no_change(rule: MatrixRule) -> None:
    start = gaussian(6, 10)
    after, states = train(rule, start, noise((6, 10)), 3, lr=0.0)
    assert torch.equal(after, start)
    assert all(state.any() for state in states.values())  # but what was seen is noted


@EVERY
def test_the_rate_may_be_a_tensor(rule: MatrixRule) -> None:
    one, _ = train(rule, gaussian(6, 10), noise((6, 10)), 3, lr=0.25)
    other, _ = train(rule, gaussian(6, 10), noise((6, 10)), 3, lr=torch.tensor(0.25))
    assert torch.equal(one, other)


@EVERY
def test_more_dims_are_columns(rule: MatrixRule) -> None:
    flat, states = train(rule, gaussian(4, 15), noise((4, 15)), 3)
    deep, deep_states = train(rule, gaussian(4, 15).reshape(4, 3, 5), noise((4, 3, 5)), 3)
    assert torch.equal(deep.reshape(4, 15), flat)
    assert all(torch.equal(s.reshape(states[name].shape), states[name]) for name, s in deep_states.items())


@EVERY
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 2)], ids=str)
def test_an_empty_parameter_has_an_empty_step(rule: MatrixRule, shape: tuple[int, ...]) -> None:
    after, states = train(rule, torch.zeros(shape), lambda w, _: torch.zeros_like(w), 2)
    assert after.shape == shape
    assert not any(state.any() for state in states.values())


@EVERY
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_no_error(rule: MatrixRule, bad: float) -> None:
    """The optimizer skips such a step; but on a device it learns that only after the rule has run."""
    gradient = gaussian(6, 10)
    gradient[2, 3] = bad
    for step in (1, 2):
        options = options_of(rule)
        change, _ = rule.update(gaussian(6, 10, seed=1), gradient, fresh(rule, (6, 10), options), options, step)
        assert change.shape == (6, 10)


@EVERY
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1)], ids=str)
def test_vectors_written_as_matrices_learn(rule: MatrixRule, shape: tuple[int, int]) -> None:
    """Some targets lie on the other side of zero: a length of one element must pass through it."""
    start = torch.linspace(0.3, 0.9, shape[0] * shape[1]).reshape(shape)
    target = start * torch.where(torch.arange(start.numel()) % 2 == 0, -1, 1).reshape(shape)
    learned, _ = train(rule, start, lambda w, _: w - target, 400, lr=0.1, weight_decay=0.0, decaying=True)
    assert float((learned - target).abs().max()) < 0.01


# ── determinism and scale ───────────────────────────────────────────────────────────────────────────────────────────


@EVERY
def test_the_same_bits_twice_and_from_elsewhere_in_memory(rule: MatrixRule) -> None:
    shape = (32, 48)
    one, states = train(rule, gaussian(*shape), noise(shape), 7, rank=8)
    odd = torch.empty(32 * 48 + 3)[3:].view(shape).copy_(gaussian(*shape))
    other, others = train(rule, odd, lambda w, step: noise(shape)(w, step).T.contiguous().T, 7, rank=8)
    assert torch.equal(one, other)
    assert all(torch.equal(states[name], others[name]) for name in states)


@EVERY
def test_a_run_cut_in_two_is_the_same_run(rule: MatrixRule) -> None:
    shape, options = (8, 12), options_of(rule)
    whole, _ = train(rule, gaussian(*shape), noise(shape), 13)
    weight, states = train(rule, gaussian(*shape), noise(shape), 6)
    states = {name: state.clone() for name, state in states.items()}
    for step in range(7, 14):
        change, states = rule.update(weight, noise(shape)(weight, step), states, options, step)
        weight = weight + change
    assert torch.equal(weight, whole)


@EVERY
def test_powers_of_two_on_the_gradients_change_no_bit(rule: MatrixRule) -> None:
    shape = (12, 20)
    silent = {"eps": (0.0, 0.0) if rule is ADAFACTOR else 0.0}
    one, _ = train(rule, gaussian(*shape), noise(shape), 7, **silent)
    other, _ = train(rule, gaussian(*shape), lambda w, step: noise(shape)(w, step) * 2.0**-20, 7, **silent)
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-22, 0.7, 1e22])
def test_muons_change_does_not_depend_on_the_gradients_scale(dtype: str, scale: float) -> None:
    shape = (12, 20)
    one, _ = train(MUON, torch.zeros(shape), noise(shape), 5, ns_dtype=dtype)
    other, _ = train(MUON, torch.zeros(shape), lambda w, step: noise(shape)(w, step) * scale, 5, ns_dtype=dtype)
    assert relative(other, one) < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)], ids=["wide", "tall", "square"])
def test_muons_step_is_nearly_orthogonal_and_as_large_as_adamws(shape: tuple[int, int]) -> None:
    change, _ = train(MUON, torch.zeros(shape), noise(shape), 1, lr=1.0, ns_dtype="bfloat16", weight_decay=0.0)
    assert 0.13 < float(change.square().mean().sqrt()) < 0.25  # AdamW's are 0.2 to 0.4 in training
    original, _ = train(MUON, torch.zeros(shape), noise(shape), 1, lr=1.0, adjust_lr_fn="original", weight_decay=0.0)
    values = torch.linalg.svdvals(original) / max(1.0, shape[0] / shape[1]) ** 0.5
    # The smallest few of a square matrix lie under what five iterations can lift.
    assert float(values[:-8].min()) > 0.65 and float(values.max()) < 1.25


# ── subspaces ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24), (3, 9000)], ids=str)
def test_the_basis_is_the_decompositions_with_its_signs_fixed(shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    rank = min(3, *shape)
    basis = leading_basis(x, rank)
    u, _, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    wanted = torch.from_numpy((vt[:rank].T if shape[0] >= shape[1] else u[:, :rank]).copy())
    signs = (basis.double() * wanted).sum(0).sign()
    assert float((basis.double() - wanted * signs).abs().max()) < 1e-6
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(leading_basis(-x, rank), basis)
    assert torch.equal(leading_basis(x * 2.0**-60, rank), basis)  # its squares are below float32


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24), (3, 9000)], ids=str)
def test_the_longer_basis_is_the_decompositions_with_its_signs_fixed(shape: tuple[int, int]) -> None:
    x = gaussian(*shape)
    rank = min(3, *shape)
    basis = longer_basis(x, leading_basis(x, rank))
    u, _, vt = np.linalg.svd(x.double().numpy(), full_matrices=False)
    wanted = torch.from_numpy((u[:, :rank] if shape[0] >= shape[1] else vt[:rank].T).copy())
    assert float((basis.double() - wanted * (basis.double() * wanted).sum(0).sign()).abs().max()) < 1e-6
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    assert torch.equal(longer_basis(x * 2.0**-60, leading_basis(x, rank)), basis)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_bases_stay_orthonormal_where_a_matrix_has_fewer_directions(shape: tuple[int, int]) -> None:
    x = gaussian(shape[0], 1, seed=1) @ gaussian(1, shape[1], seed=2)
    for basis in PROJECTIONS["full"].find(x, 4).values():
        assert torch.allclose(basis.mT @ basis, torch.eye(4), atol=1e-6)


@pytest.mark.parametrize("kind", PROJECTIONS)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=["wide", "tall", "square"])
def test_what_lies_in_the_subspace_is_lifted_back_whole(kind: str, shape: tuple[int, int]) -> None:
    x = gaussian(shape[0], 3, seed=1) @ gaussian(3, shape[1], seed=2)
    projection = PROJECTIONS[kind]
    bases = projection.find(x, 3)
    assert {name: tuple(basis.shape) for name, basis in bases.items()} == projection.bases(*shape, 3)
    coordinates = projection.project(bases, x)
    assert tuple(coordinates.shape) == projection.coordinates(*shape, 3)
    assert torch.allclose(projection.lift(bases, coordinates, shape[0] >= shape[1]), x, atol=1e-5)


def test_the_basis_is_found_at_the_first_step_and_every_gap_after_it() -> None:
    shape, found = (6, 10), []
    options = options_of(GALORE, update_proj_gap=3)
    states = fresh(GALORE, shape, options)
    for step in range(1, 9):
        _, new = GALORE.update(gaussian(*shape), noise(shape)(gaussian(*shape), step), states, options, step)
        if not torch.equal(new["projector"], states["projector"]):
            found.append(step)
        states = new
    assert found == [1, 4, 7]


@pytest.mark.parametrize("rule", [GALORE, GRADNORM_LORP], ids=lambda rule: rule.name)
def test_silent_first_steps_do_not_cost_a_gap(rule: MatrixRule) -> None:
    """What lies behind a zero-initialised head has no gradient at first; its subspace must wait for one."""
    shape, options = (6, 10), options_of(rule, update_proj_gap=200)
    states, weight = fresh(rule, shape, options), gaussian(*shape)
    for step in (1, 2):
        change, states = rule.update(weight, torch.zeros(shape), states, {**options, "weight_decay": 0.0}, step)
        assert not change.any() and not states["projector"].any()
    _, states = rule.update(weight, gaussian(*shape, seed=5), states, options, 3)
    assert float((states["projector"].mT @ states["projector"] - torch.eye(4)).abs().max()) < 1e-6
    # At the next gap's end a silent gradient leaves the basis that there is.
    _, later = rule.update(weight, torch.zeros(shape), states, options, 201)
    assert torch.equal(later["projector"], states["projector"])


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)], ids=["wide", "tall"])
def test_galore_steps_within_its_rank(shape: tuple[int, int]) -> None:
    change, _ = train(GALORE, torch.zeros(shape), noise(shape), 5, rank=3, update_proj_gap=200, weight_decay=0.0)
    values = torch.linalg.svdvals(change.double())
    assert int((values > 1e-5 * values[0]).sum()) == 3


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=["wide", "tall"])
def test_galore_of_full_rank_along_the_axes_is_adamw(shape: tuple[int, int]) -> None:
    """A gradient whose singular vectors are axes is projected onto a permutation, and nothing is left to differ."""
    start, diagonal = gaussian(*shape), torch.arange(6.0, 0.0, -1.0)

    def gradient(w: Tensor, step: int) -> Tensor:
        if step > 1:
            return noise(shape)(w, step)
        g = torch.zeros(shape)
        g.diagonal().copy_(diagonal)
        return g

    ours, _ = train(GALORE, start, gradient, 8, rank=100, update_proj_gap=200, lr=1e-2)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.01)
    for step in range(1, 9):
        theirs.grad = gradient(start, step)
        optimizer.step()
    assert relative(ours - start, theirs.detach() - start) < 1e-5


# ── lengths and directions ──────────────────────────────────────────────────────────────────────────────────────────


def test_lengths_and_directions_are_trained_apart() -> None:
    """A gradient along the columns changes only lengths; one across them only directions; decay only lengths."""
    w = gaussian(12, 5, seed=1)
    unit = w / w.norm(dim=0)
    across = gaussian(12, 5, seed=2)
    across = across - unit * (across * unit).sum(0)
    silent = {"lr": 0.1, "weight_decay": 0.0, "eps": 0.1}  # so that rounding noise is not taken for a slope
    longer, _ = train(GRADNORM_LORP, w, lambda *_: 10 * unit, 1, **silent)
    assert torch.allclose(longer / longer.norm(dim=0), unit, atol=1e-6)
    assert torch.allclose(longer.norm(dim=0) - w.norm(dim=0), torch.full((5,), -0.1), atol=2e-3)
    turned, _ = train(GRADNORM_LORP, w, lambda *_: across, 1, **silent)
    assert torch.allclose(turned.norm(dim=0), w.norm(dim=0), rtol=1e-6)
    assert float((turned / turned.norm(dim=0) - unit).norm()) > 1e-2
    decayed, _ = train(GRADNORM_LORP, w, lambda *_: across, 1, **{**silent, "weight_decay": 0.5})
    assert torch.allclose(decayed, 0.95 * turned, rtol=1e-5, atol=1e-6)


def test_a_small_change_keeps_its_digits() -> None:
    """New weight less old weight, in float32, would be a multiple of 2^-24 of the weight: wrong by tenths here."""
    shape, start = (64, 48), gaussian(64, 48)
    options = options_of(GRADNORM_LORP, lr=1e-7, weight_decay=0.1)
    gradient = gaussian(*shape, seed=5)
    change, _ = GRADNORM_LORP.update(start, gradient, fresh(GRADNORM_LORP, shape, options), options, 1)
    expert = oracle.WeightNormalised(
        oracle.Subspace(oracle.Adam(1e-7, (0.9, 0.999), 1e-8), rank=4, gap=5, scale=1.0),
        oracle.Adam(1e-7, (0.9, 0.999), 1e-8),
        weight_decay=0.1,
    )
    wanted = expert.step(start.double().numpy(), gradient.double().numpy()) - start.double().numpy()
    assert relative(change, wanted) < 1e-5
    assert relative((start + change) - start, wanted) > 0.05


def test_columns_of_zeros_begin_to_train_and_others_do_not_notice() -> None:
    shape = (12, 5)
    w, g = gaussian(*shape, seed=1), gaussian(*shape, seed=2)
    w[:, 2] = 0
    once, _ = train(GRADNORM_LORP, w, lambda *_: g, 1, lr=0.01, weight_decay=0.1)
    assert once.isfinite().all()
    assert float(once[:, 2].norm()) > 0.005 and float((once[:, 2] * g[:, 2]).sum()) < 0
    assert torch.allclose(once.norm(dim=0)[[0, 1, 3, 4]], w.norm(dim=0)[[0, 1, 3, 4]], atol=0.02)


def test_a_length_that_passes_through_zero_goes_on_as_it_came() -> None:
    """One element under a constant slope falls by the rate at every step; its direction turns round on the way."""
    heights, options = [torch.full((1, 1), 0.25)], options_of(GRADNORM_LORP, lr=0.1, weight_decay=0.0)
    states = fresh(GRADNORM_LORP, (1, 1), options)
    for step in range(1, 11):
        change, states = GRADNORM_LORP.update(heights[-1], torch.ones(1, 1), states, options, step)
        heights.append(heights[-1] + change)
    wanted = [0.25 - 0.1 * step for step in range(11)]
    assert [height.item() for height in heights] == pytest.approx(wanted, abs=1e-5)


def test_a_column_that_steps_onto_zero_becomes_one_of_zeros() -> None:
    """W + D = 0 has no direction, and must not become NaN. A column of zeros takes D as it is, which shows D."""
    options = options_of(GRADNORM_LORP, update_proj_gap=200, weight_decay=0.0)
    states = fresh(GRADNORM_LORP, (4, 2), options)
    states["projector"] += torch.eye(2)
    states["projected_exp_avg"] += gaussian(4, 2)
    states["projected_exp_avg_sq"] += gaussian(4, 2, seed=1).square()
    step, _ = GRADNORM_LORP.update(torch.zeros(4, 2), torch.zeros(4, 2), states, options, 2)
    assert step.abs().min() > 0
    change, _ = GRADNORM_LORP.update(-step, torch.zeros(4, 2), states, options, 2)
    assert torch.equal(change, step)
