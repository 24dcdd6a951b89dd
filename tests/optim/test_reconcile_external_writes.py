"""What others do to parameters between steps: another value is adopted, another tensor refused, and memory never corrupted."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.optim import codec
from optim.pairs import Shape, build, everything, parameters
from optim.scenarios import REPRESENTATIVES, row_of, visible_dtype
from tensors import assert_same_bits, parameters_of, take_steps

# A large matrix, a small one and a vector.
SHAPES: list[Shape] = [(80, 64), (12, 10), (6,)]
# In rows relative to their largest a weight that is set is cut once more, and small matrices have no bucket.
STORED = pytest.mark.parametrize("storage", [s for s in REPRESENTATIVES if "weight" not in row_of(s).scaled])
FLAT = pytest.mark.parametrize("storage", [s for s in REPRESENTATIVES if not codec.by_rows(row_of(s))])
pytestmark = pytest.mark.filterwarnings("ignore:weights of .* were modified outside this optimizer")


def trained(storage: str, steps: int = 3, **options: object) -> ng.Optimizer:
    optimizer = build("adamw", parameters(storage, SHAPES), storage, **{"lr": 1e-3, "audit_every": 0, **options})
    take_steps(optimizer, range(steps))
    return optimizer


def visible(storage: str, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Far from all that the optimizer left, so that no element is what it was.
    return [(4 + torch.rand(shape, generator=generator)).to(visible_dtype(storage)) for shape in SHAPES]


def loaded(optimizer: ng.Optimizer, values: list[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(parameters_of(optimizer), values, strict=True):
            p.copy_(value)


# ── another value ───────────────────────────────────────────────────────────────────────────────────────────────────


@STORED
def test_a_weight_that_was_set_is_the_stored_one(storage: str) -> None:
    """Before the next step and after it: a step from the new value, and not from the old one."""
    optimizer, values = trained(storage), visible(storage)
    loaded(optimizer, values)
    for p, value in zip(parameters_of(optimizer), values, strict=True):
        assert torch.equal(optimizer.stored(p), value.float())
    take_steps(optimizer, range(3, 4))
    for p, value in zip(parameters_of(optimizer), values, strict=True):
        assert float((p.detach().float() - value.float()).abs().max()) < 0.05


@STORED
def test_a_weight_that_was_set_leaves_no_trace_of_the_old_one(storage: str) -> None:
    """Two runs that differ in their weights alone are one, once both are given the same."""
    one, other = trained(storage), trained(storage)
    with torch.no_grad():
        for p in parameters_of(other):
            p.mul_(0.5)
    found = []
    for optimizer in (one, other):
        loaded(optimizer, visible(storage))
        take_steps(optimizer, range(3, 5))
        found.append([optimizer.stored(p) for p in parameters_of(optimizer)])
    assert all(map(torch.equal, *found))


@FLAT
@pytest.mark.parametrize("through", ["no_grad", "data"])
def test_only_what_was_changed_is_adopted(storage: str, through: str) -> None:
    """A mask on small parameters, whose bucket knows what it left: the others keep every stored bit."""
    optimizer = trained(storage, audit_every=4)  # the next step is audited: then writes through .data are seen too
    small = parameters_of(optimizer)[1:]
    before = [optimizer.stored(p) for p in small]
    masks = [torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) > 0.3 for p in small]
    for p, mask in zip(small, masks, strict=True):
        if through == "data":
            p.data.mul_(mask)
        else:
            with torch.no_grad():
                p.mul_(mask)
    twin = trained(storage, audit_every=4)
    twin.adopt({p: b * mask for p, b, mask in zip(parameters_of(twin)[1:], before, masks, strict=True)})
    for each in (optimizer, twin):
        take_steps(each, range(3, 4))
    if row_of(storage).weight.parts == 1:  # parts that are given as one sum need not be the same parts
        assert_same_bits(everything(twin), everything(optimizer))
    for p, b, mask in zip(small, before, masks, strict=True):
        moved = (optimizer.stored(p) - b * mask).abs()
        assert float(moved.max()) < 0.02


@STORED
def test_a_large_weight_that_is_masked_at_every_step_keeps_its_tails(storage: str) -> None:
    """From the third time on, when there is a copy of what was left."""
    optimizer = trained(storage)
    (p, *_), mask = parameters_of(optimizer), torch.ones(SHAPES[0], dtype=torch.bool)
    mask[::3] = False
    for step in range(3, 6):
        with torch.no_grad():
            p.mul_(mask)
        before = optimizer.stored(p)
        take_steps(optimizer, range(step, step + 1))
    with torch.no_grad():
        wanted = optimizer.stored(p) * mask
        p.mul_(mask)
    assert torch.equal(optimizer.stored(p), wanted)
    assert before.shape == wanted.shape and not (wanted[::3]).any()


@FLAT
def test_what_is_put_back_was_never_changed(storage: str) -> None:
    """An average of small weights swapped in for an evaluation, and out again."""
    optimizer, twin = trained(storage), trained(storage)
    kept = [p.detach().clone() for p in parameters_of(optimizer)]
    with torch.no_grad():
        for p, value in zip(parameters_of(optimizer)[1:], kept[1:], strict=True):
            p.copy_(value * 0.5)
            p.copy_(value)
    for each in (optimizer, twin):
        take_steps(each, range(3, 5))
    assert_same_bits(everything(twin), everything(optimizer))


@STORED
def test_before_the_first_step_the_same_value_is_no_change(storage: str) -> None:
    """As when ranks are given rank 0's weights after :func:`narrowgauge.prepare`: tails are those of the float32 weights."""
    wide = [torch.randn(shape, generator=torch.Generator().manual_seed(9)) for shape in SHAPES]
    found = []
    for again in (False, True):
        optimizer = build("adamw", parameters(storage, SHAPES), storage)
        optimizer.adopt(dict(zip(parameters_of(optimizer), wide, strict=True)))
        if again:
            loaded(optimizer, [p.detach().clone() for p in parameters_of(optimizer)])
        take_steps(optimizer, range(2))
        found.append(everything(optimizer))
    assert_same_bits(*found)


@STORED
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_checkpoint_is_restored_in_either_order(storage: str, first: str) -> None:
    saved = trained(storage)
    weights, state = [p.detach().clone() for p in parameters_of(saved)], saved.state_dict()
    optimizer = trained(storage, 1)
    loaded(optimizer, visible(storage))
    if first == "model":
        loaded(optimizer, weights)
    optimizer.load_state_dict(state)
    if first == "optimizer":
        loaded(optimizer, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (saved, optimizer):
            take_steps(each, range(3, 5))
    assert_same_bits(everything(saved), everything(optimizer))


def test_it_is_said_once() -> None:
    optimizer = trained("word")
    for expected in (True, False):
        loaded(optimizer, visible("word"))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            take_steps(optimizer, range(1))
        assert [str(w.message).split(":")[0][:24] for w in told] == ["weights of 'param 0' and"] * expected


@STORED
def test_a_write_through_data_is_seen_at_the_next_audit(storage: str) -> None:
    optimizer, values = trained(storage, audit_every=4), visible(storage)
    for p, value in zip(parameters_of(optimizer), values, strict=True):
        p.data.copy_(value)
    twin = trained(storage, audit_every=4)
    loaded(twin, values)
    for each in (optimizer, twin):
        take_steps(each, range(3, 4))
    assert_same_bits(everything(twin), everything(optimizer))


@STORED
def test_refresh_adopts_what_cannot_be_noticed(storage: str) -> None:
    optimizer, values = trained(storage), visible(storage)
    for p, value in zip(parameters_of(optimizer), values, strict=True):
        p.data.copy_(value)
    optimizer.refresh()
    for p, value in zip(parameters_of(optimizer), values, strict=True):
        assert torch.equal(optimizer.stored(p), value.float())


def test_a_master_gives_way_in_the_kernel() -> None:
    """Element by element, whatever wrote to the weight, and even where nobody looks."""
    optimizer = trained("master", lr=0.0, weight_decay=0.0)
    (p, *_), before = parameters_of(optimizer), optimizer.stored(parameters_of(optimizer)[0])
    p.data[0] = 3.0
    p.data[1] = p.data[1].clone()
    take_steps(optimizer, range(3, 4))
    assert torch.equal(optimizer.stored(p)[0], torch.full((64,), 3.0)) and torch.equal(
        p[0].float(), torch.full((64,), 3.0)
    )
    assert torch.equal(optimizer.stored(p)[1:], before[1:])


def test_prepared_model_goes_on_from_loaded_weights() -> None:
    """The defect itself: one step after loading, the loss is that of the loaded weights."""
    for storage in ("master", "word", "exact", "compact"):
        torch.manual_seed(0)
        model, optimizer = ng.prepare(nn.Linear(64, 96), f"bfloat16/{storage}", lr=1e-4)
        take_steps(optimizer, range(2))
        state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        take_steps(optimizer, range(2, 3))
        for name, value in model.state_dict().items():
            assert float((value - state[name]).abs().max()) < 0.02, (storage, name)


# ── another tensor ──────────────────────────────────────────────────────────────────────────────────────────────────

CHANGES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "grown": lambda p: torch.cat([p.data] * 3),
    "cut": lambda p: p.data[:1],
    "cut to a copy": lambda p: p.data[:1].clone(),
    "flat": lambda p: p.data.view(-1),
    "float": lambda p: p.data.double() if p.dtype is torch.float32 else p.data.float(),
    "half": lambda p: p.data.bfloat16() if p.dtype is torch.float16 else p.data.half(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("storage", ["float32", "master", "word", "compact", "states8", "kahan", "float16/split"])
@pytest.mark.parametrize("which", [0, 1])
def test_another_shape_or_dtype_is_refused(storage: str, change: str, which: int) -> None:
    optimizer = trained(storage)
    p = parameters_of(optimizer)[which]
    p.grad = None
    p.data = CHANGES[change](p)
    p.grad = torch.ones_like(p)
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.stored(p), optimizer.refresh):
        with pytest.raises(RecipeError, match=rf"'param {which}' is .* now, and its states were made for .*new one"):
            use()


def test_a_gradient_of_another_shape_is_refused() -> None:
    optimizer = build("adamw", parameters("word", SHAPES), "word")
    p = parameters_of(optimizer)[0]
    p.grad = torch.ones_like(p)
    p.data = torch.cat([p.data] * 2)
    with pytest.raises(RecipeError, match="gradient has the shape"):
        optimizer.step()


def test_a_dtype_that_changes_before_the_first_step_is_refused() -> None:
    weight = nn.Parameter(torch.ones(80, 64, dtype=torch.bfloat16))
    optimizer = ng.AdamW([weight], storage="word")
    weight.data = weight.data.float()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RecipeError, match="holds bfloat16 weights"):
        optimizer.step()


@FLAT
def test_the_same_values_elsewhere_in_memory_are_the_same_weights(storage: str) -> None:
    optimizer, twin = trained(storage), trained(storage)
    for p in parameters_of(optimizer)[1:]:
        p.data = p.data.clone()
    for each in (optimizer, twin):
        take_steps(each, range(3, 5))
    assert_same_bits(everything(twin), everything(optimizer))


@STORED
def test_other_strides_are_other_places_of_the_same_elements(storage: str) -> None:
    """A square matrix that is transposed in place: the same address, shape and count of writes."""
    shapes: list[Shape] = [(24, 24)]
    optimizers = [build("adamw", parameters(storage, shapes), storage, lr=1e-3, audit_every=0) for _ in range(2)]
    for optimizer in optimizers:
        take_steps(optimizer, range(2))
    crossed = parameters_of(optimizers[0])[0]
    values = crossed.detach().clone()
    crossed.data = crossed.data.t()
    loaded_from = crossed.detach().clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        parameters_of(optimizers[1])[0].copy_(loaded_from)
    for optimizer in optimizers:
        take_steps(optimizer, range(2, 4))
    assert torch.equal(crossed.detach(), parameters_of(optimizers[1])[0].detach())
    assert values.shape == crossed.shape and not crossed.is_contiguous()


CRASHES = """
import sys, torch, narrowgauge as ng
torch.manual_seed(0)
change, storage = sys.argv[1:]
model, optimizer = ng.prepare(torch.nn.Embedding(600, 512), f"bfloat16/{storage}", compile=True)
def step():
    optimizer.zero_grad()
    model(torch.arange(5)).float().square().sum().backward()
    optimizer.step()
step()
w = model.weight
optimizer.zero_grad()
if change == "resize":
    w.data = torch.cat([w.data, w.data])
elif change == "shrink":
    w.data = w.data[:50].clone()
else:
    w.data = getattr(w.data, change)()
try:
    step()
except ng.errors.RecipeError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("change", ["shrink", "half"])
def test_no_process_dies_of_it(change: str, tmp_path: Path) -> None:
    """With compiled kernels, which write to memory as they are told."""
    command = [sys.executable, "-c", CRASHES, change, "word"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("refused: parameter")


def test_a_row_that_was_set_is_cut_as_if_it_were_adopted() -> None:
    storage = "float8/collage-plus"
    optimizer, twin, values = trained(storage), trained(storage), visible(storage)
    loaded(optimizer, values)
    twin.adopt({p: value.float() for p, value in zip(parameters_of(twin), values, strict=True)})
    for each in (optimizer, twin):
        take_steps(each, range(3, 5))
    assert_same_bits(everything(twin), everything(optimizer))
