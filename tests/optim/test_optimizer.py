"""The optimizer as ``torch.optim`` knows one: groups, closures, schedules, saving, copying, and odd parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import REPRESENTATIVES, storage_error
from tensors import bits, parameters_of, take_steps

SHAPES: list[tuple[int, ...]] = [(4, 6), (5,), (3, 3, 3), (1, 1), (7, 1)]
SAME = pytest.mark.parametrize("storage", REPRESENTATIVES)


def visible(storage: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, STORAGES[storage].visible)
    return dtype


def parameters(storage: str, shapes: list[tuple[int, ...]] | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in (SHAPES if shapes is None else shapes)]
    return [nn.Parameter(value.to(visible(storage))) for value in values]


def adamw(params: Any, storage: str, **options: Any) -> ng.AdamW:
    return ng.AdamW(params, storage=storage, **{"lr": 1e-2, "audit_every": 2, **options})


def everything(optimizer: ng.AdamW) -> list[Tensor]:
    """Visible weights, then all that is kept, as bytes."""
    kept = [p.detach() for p in parameters_of(optimizer)]
    kept += [optimizer.stored(p, n) for p in parameters_of(optimizer) for n in ("weight", "exp_avg", "exp_avg_sq")]
    return [bits(value).clone() for value in kept]


def assert_same(one: ng.AdamW, other: ng.AdamW) -> None:
    pairs = list(zip(everything(one), everything(other), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)


# ── saving ──────────────────────────────────────────────────────────────────────────────────────────────────────


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def through_safetensors(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"{k}/{name}": value for k, entry in state["state"].items() for name, value in entry.items()}
    entries: dict[int, dict[str, Tensor]] = {}
    for name, value in load(save(flat)).items():
        number, key = name.split("/")
        entries.setdefault(int(number), {})[key] = value
    return {"state": entries, "param_groups": state["param_groups"]}


@SAME
@pytest.mark.parametrize("through", [through_torch, through_safetensors, copy.deepcopy])
def test_a_saved_state_continues_bit_for_bit(storage: str, through: Callable[[Any], Any]) -> None:
    first = adamw(parameters(storage), storage)
    take_steps(first, range(5))
    second = adamw([nn.Parameter(p.detach().clone()) for p in parameters_of(first)], storage)
    second.load_state_dict(through(first.state_dict()))
    assert_same(first, second)
    for optimizer in (first, second):
        take_steps(optimizer, range(5, 9))
    assert_same(first, second)


@SAME
def test_the_state_is_parameter_shaped_and_nothing_is_cast(storage: str) -> None:
    optimizer = adamw(parameters(storage), storage)
    take_steps(optimizer, range(3))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()
    assert sorted(saved["state"]) == list(range(len(SHAPES)))
    for k, shape in enumerate(SHAPES):
        assert float(saved["state"][k]["step"]) == 3.0
        for key, value in saved["state"][k].items():
            # A row's bound is one number a row: of the parameter's dims the last is 1, so that both are cut alike.
            assert key == "step" or value.shape == ((*shape[:-1], 1) if key.endswith("_bound") else shape)
            assert again["state"][k][key].dtype is value.dtype and torch.equal(again["state"][k][key], value)


@pytest.mark.parametrize("storage", ["float32", "master", "exact"])
def test_plain_states_have_torchs_names(storage: str) -> None:
    optimizer = adamw(parameters(storage), storage)
    take_steps(optimizer, range(1))
    entry = optimizer.state_dict()["state"][0]
    assert entry.keys() - {"master", "tail"} == {"step", "exp_avg", "exp_avg_sq"}
    assert entry["exp_avg"].dtype is entry["exp_avg_sq"].dtype is torch.float32
    assert torch.equal(entry["exp_avg"], optimizer.stored(parameters_of(optimizer)[0], "exp_avg"))


def test_a_state_is_a_copy_of_nothing_that_moves_on() -> None:
    optimizer = adamw(parameters("word"), "word")
    take_steps(optimizer, range(2))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    take_steps(optimizer, range(2, 4))
    optimizer.load_state_dict(before)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2.0


def test_a_state_of_another_storage_or_shape_is_refused() -> None:
    word, split = adamw(parameters("word"), "word"), adamw(parameters("split"), "split")
    take_steps(word, range(1))
    state = {**word.state_dict(), "param_groups": split.state_dict()["param_groups"]}
    with pytest.raises(ng.errors.RecipeError, match="storage 'split' needs"):
        split.load_state_dict(state)
    shapes: list[tuple[int, ...]] = [(6, 4), *SHAPES[1:]]
    with pytest.raises(ng.errors.RecipeError, match="of shape"):
        adamw(parameters("word", shapes), "word").load_state_dict(word.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        adamw(parameters("word")[:2], "word").load_state_dict(word.state_dict())


@SAME
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_its_own_way(storage: str, copied: Callable[[Any], Any]) -> None:
    first = adamw(parameters(storage), storage, seed=3, max_grad_norm=0.5)
    take_steps(first, range(3))
    second = copied(first)
    assert_same(first, second)
    before = everything(first)
    take_steps(second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, everything(first), strict=True)), "the first is untouched"
    take_steps(first, range(3, 6))
    assert_same(first, second)
    assert (second.param_groups[0]["seed"], second.max_grad_norm, second.audit_every) == (3, 0.5, 2)


def test_a_model_and_its_optimizer_are_copied_together() -> None:
    model, optimizer = ng.prepare(nn.Linear(4, 3), "bfloat16/word")
    model2, optimizer2 = copy.deepcopy((model, optimizer))
    assert parameters_of(optimizer2)[0] is model2.weight
    take_steps(optimizer, range(2))
    take_steps(optimizer2, range(2))
    assert_same(optimizer, optimizer2)


# ── the interface ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["float32", "exact", "compact"])
def test_what_is_kept_can_be_looked_at_by_name(storage: str) -> None:
    """As in torch: ``state`` shows all that is kept, shaped like the parameter, under torch's names, and what is saved."""
    optimizer = adamw(parameters(storage), storage)
    take_steps(optimizer, range(1))
    saved = optimizer.state_dict()["state"]
    for number, p in enumerate(parameters_of(optimizer)):
        shown, packed = optimizer.state[p], saved[number].keys() - {"step", "master", "exp_avg", "exp_avg_sq"}
        if any(name.endswith("_bound") for name in packed):
            packed = set()  # which its scales belong to
        assert shown.keys() - {"master"} == {"step", "exp_avg", "exp_avg_sq"} | packed
        assert {shown[name].shape for name in ("exp_avg", "exp_avg_sq", *{"master"} & shown.keys())} == {p.shape}
        for name in packed:
            assert torch.equal(shown[name], saved[number][name])
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][name], optimizer.stored(p, name))


def test_words_and_bounds_of_one_state_have_names_of_their_own() -> None:
    optimizer = adamw(parameters("word")[:1], "bfloat16+e4m3-row+float32")
    take_steps(optimizer, range(1))
    (entry,) = optimizer.state_dict()["state"].values()
    assert entry.keys() == {"step", "exp_avg", "exp_avg_sq", "exp_avg_bound"} and entry["exp_avg"].dtype is torch.int8


@SAME
def test_schedules_and_groups_are_obeyed(storage: str) -> None:
    one, other = parameters(storage)[:2], parameters(storage)[2:]
    optimizer = adamw([{"params": one}, {"params": other, "lr": 0.0}], storage, weight_decay=0.0)
    # Bfloat16 is not yet what the 8-bit rows hold: a step of nothing would split it into its parts.
    optimizer.adopt({p: p.detach().float() for p in other})
    still = [bits(p).clone() for p in other]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    take_steps(optimizer, range(2))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 0.0]
    assert all(torch.equal(bits(p), before) for p, before in zip(other, still, strict=True))


def test_a_tensor_learning_rate_is_the_same_as_a_float() -> None:
    one, other = adamw(parameters("word"), "word", lr=0.25), adamw(parameters("word"), "word", lr=torch.tensor(0.25))
    for optimizer in (one, other):
        take_steps(optimizer, range(3))
    assert_same(one, other)


def test_a_closure_is_called_with_gradients_on() -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = adamw([weight], "word")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.float().square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) == 6.0
    assert closure().item() < 6.0


def test_groups_are_added_later_with_their_own_storage() -> None:
    params = parameters("word")
    optimizer = adamw(params[:2], "word")
    take_steps(optimizer, range(3))
    optimizer.add_param_group({"params": params[2:], "storage": "exact"})
    take_steps(optimizer, range(3, 5))
    state = optimizer.state_dict()
    assert [float(state["state"][k]["step"]) for k in range(5)] == [5.0, 5.0, 2.0, 2.0, 2.0]
    twin = adamw([nn.Parameter(p.detach().clone()) for p in params[:2]], "word")
    twin.add_param_group({"params": [nn.Parameter(p.detach().clone()) for p in params[2:]], "storage": "exact"})
    twin.load_state_dict(state)
    for each in (optimizer, twin):
        take_steps(each, range(5, 8))
    assert_same(optimizer, twin)


def test_a_wrong_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = adamw(parameters("word"), "word")
    for group in ({"params": parameters("float32")}, {"params": parameters("exact"), "storage": "exakt"}):
        with pytest.raises(ng.errors.RecipeError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, range(1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"betas": (1.0, 0.9)}, "beta1 = 1.0"),
        ({"betas": (0.9, -0.1)}, "beta2 = -0.1"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"storage": "wrod"}, "Did you mean 'word'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ng.errors.RecipeError) as caught:
        ng.AdamW(parameters("word"), **options)
    assert says in str(caught.value)


def test_weights_in_another_format_are_refused_with_advice() -> None:
    with pytest.raises(ng.errors.RecipeError, match="holds bfloat16 weights, and a parameter of shape") as caught:
        adamw(parameters("float32"), "word")
    assert "narrowgauge.prepare" in str(caught.value)


@SAME
@pytest.mark.parametrize("name", ["weight", "exp_avg", "exp_avg_sq"])
def test_what_is_stored_is_given_as_a_copy(storage: str, name: str) -> None:
    optimizer = adamw(parameters(storage, [(4, 6), (3, 50, 50)]), storage)
    take_steps(optimizer, range(1))
    for p in parameters_of(optimizer):
        given = optimizer.stored(p, name)
        kept = given.clone()
        given.fill_(7.0)
        assert torch.equal(optimizer.stored(p, name), kept) and not (p == 7).all()


def test_stored_of_a_strange_tensor_or_name_is_refused() -> None:
    optimizer = adamw(parameters("word"), "word")
    with pytest.raises(KeyError):
        optimizer.stored(torch.zeros(4, 6))
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.stored(parameters_of(optimizer)[0], "momentum")


# ── odd parameters and gradients ────────────────────────────────────────────────────────────────────────────────


@SAME
def test_parameters_without_a_gradient_stay_and_catch_up_later(storage: str) -> None:
    optimizer = adamw(parameters(storage), storage, weight_decay=0.5)
    take_steps(optimizer, range(2))
    first, *rest = parameters_of(optimizer)
    before = [bits(v).clone() for v in (first.detach(), optimizer.stored(first), optimizer.stored(first, "exp_avg"))]
    for p in rest:
        p.grad = torch.ones_like(p)
    first.grad = None
    optimizer.step()
    after = [bits(v) for v in (first.detach(), optimizer.stored(first), optimizer.stored(first, "exp_avg"))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    steps = [float(optimizer.state_dict()["state"][k]["step"]) for k in range(len(SHAPES))]
    assert steps == [2.0, 3.0, 3.0, 3.0, 3.0]


def test_no_gradient_at_all_is_no_step() -> None:
    optimizer = adamw(parameters("word"), "word", max_grad_norm=1.0)
    before = everything(optimizer)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))
    assert optimizer.num_skipped == 0


@SAME
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (4, 0, 2), (1,), (1, 1), (3, 1), (1, 7)], ids=str)
def test_sizes_of_nothing_and_one(storage: str, shape: tuple[int, ...]) -> None:
    optimizer = adamw(parameters(storage, [shape, (2, 2)]), storage, max_grad_norm=1.0)
    start = [optimizer.stored(p) for p in parameters_of(optimizer)]
    take_steps(optimizer, range(4))
    assert optimizer.stored(parameters_of(optimizer)[0]).shape == shape
    for p, before in zip(parameters_of(optimizer), start, strict=True):
        assert not p.numel() or not torch.equal(optimizer.stored(p), before)
    twin = adamw([nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)], storage, max_grad_norm=1.0)
    twin.load_state_dict(through_torch(optimizer.state_dict()))
    assert_same(optimizer, twin)


@SAME
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(storage: str, bad: float) -> None:
    optimizer = adamw(parameters(storage), storage, max_grad_norm=1.0)
    twin = adamw(parameters(storage), storage, max_grad_norm=1.0)
    for each in (optimizer, twin):
        take_steps(each, range(2))
    before = everything(optimizer)
    for p in parameters_of(optimizer):
        p.grad = torch.ones_like(p)
    gradient = parameters_of(optimizer)[2].grad
    assert gradient is not None
    gradient.view(-1)[4] = bad
    optimizer.step()
    assert optimizer.num_skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer), strict=True))
    for each in (optimizer, twin):
        take_steps(each, range(2, 5))
    assert_same(optimizer, twin)
    assert all(torch.isfinite(optimizer.stored(p)).all() for p in parameters_of(optimizer))


@SAME
def test_clipping_is_torchs(storage: str) -> None:
    optimizer = adamw(parameters(storage), storage, max_grad_norm=0.25)
    take_steps(optimizer, range(1))
    norm = torch.cat([p.grad.double().view(-1) for p in parameters_of(optimizer) if p.grad is not None]).norm()
    assert optimizer.grad_norm is not None
    assert abs(float(optimizer.grad_norm) / float(norm) - 1) < 1e-6
    for p in parameters_of(optimizer):
        assert p.grad is not None
        wanted = 0.1 * p.grad.double() * (0.25 / (norm + 1e-6))
        # A step of the smallest binade of an 8-bit window, where there is one, is 2^-17 of the largest in the row.
        near, floor = storage_error(storage, "exp_avg", p.ndim), 2.0**-17 * wanted.abs().max()
        error = (optimizer.stored(p, "exp_avg").double() - wanted).abs()
        assert (error <= (near + 1e-6) * wanted.abs() + (floor if near > 2.0**-5 else 1e-9)).all()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_sparse_gradient_is_refused(max_grad_norm: float | None) -> None:
    embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    optimizer = adamw(embedding.parameters(), "word", max_grad_norm=max_grad_norm)
    embedding(torch.tensor([1])).float().sum().backward()
    with pytest.raises(ng.errors.RecipeError, match="sparse"):
        optimizer.step()


@SAME
def test_a_step_that_is_refused_changes_nothing(storage: str) -> None:
    dense, embedding = nn.Parameter(torch.ones(3, 2).to(visible(storage))), nn.Embedding(4, 2, sparse=True)
    embedding = embedding.to(visible(storage))
    optimizer = adamw([dense, *embedding.parameters()], storage)
    embedding(torch.tensor([1])).float().sum().backward()
    dense.grad = torch.ones_like(dense)
    with pytest.raises(ng.errors.RecipeError, match="sparse"):
        optimizer.step()
    assert (dense == 1).all()


def test_parameters_that_are_views_are_stepped_where_they_lie() -> None:
    memory = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = [nn.Parameter(memory.t().contiguous()), nn.Parameter(memory[:, 1:4].clone())]
    views = [nn.Parameter(memory.clone().t()), nn.Parameter(memory.clone()[:, 1:4])]
    one, other = adamw(plain, "word"), adamw(views, "word")
    for optimizer in (one, other):
        take_steps(optimizer, range(4))
    assert_same(one, other)
    assert not views[0].is_contiguous() and not views[1].is_contiguous()
