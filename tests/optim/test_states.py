"""States follow their parameters as torch's do: what others may write, what is refused, and what
copies hold.
"""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.integrations.accelerate import pass_states_on
from narrowgauge.spec.storages import STORAGES
from optim.pairs import Shape, build, everything, narrow, parameters, unchanged
from optim.scenarios import REPRESENTATIVES
from tensors import assert_same_bits, parameters_of, take_steps
from text.refusals import refused

SHAPES = [(80, 64), (12, 10), (6,)]
"""A matrix that is stepped alone, and two small ones."""
STORED = pytest.mark.parametrize(
    "storage", [s for s in REPRESENTATIVES if STORAGES[s].arithmetic == "float32"]
)


def trained(
    storage: str, steps: int = 3, rule: str = "adamw", shapes: list[Shape] = SHAPES
) -> ng.Optimizer:
    optimizer = build(rule, parameters(storage, shapes), storage, lr=1e-3)
    take_steps(optimizer, range(steps))
    return optimizer


def sparse(optimizer: ng.Optimizer) -> None:
    p = parameters_of(optimizer)[0]
    p.grad = p.grad.to_sparse()


def retyped(optimizer: ng.Optimizer) -> None:
    p = parameters_of(optimizer)[0]
    p.grad = None
    p.data = p.data.float()
    p.grad = torch.zeros_like(p)


def turned(optimizer: ng.Optimizer) -> None:
    """The gradient is still that of the weight before, with as many elements."""
    p = next(p for p in parameters_of(optimizer) if p.ndim == 2 and p.shape[0] != p.shape[1])
    p.data = p.data.t().contiguous()


REFUSED = {
    sparse: "a sparse gradient",
    turned: "a parameter that was turned",
    retyped: "a parameter in another format",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_states_do_not_fit_is_refused(change):
    optimizer = trained("word")
    change(optimizer)
    with unchanged(optimizer), refused(REFUSED[change]):
        optimizer.step()


@pytest.mark.parametrize("storage", ["word", "compact", "master"])
def test_states_pass_on_to_parameters_that_replace_others(storage):
    """As Accelerate's FSDP2 does with what ``prepare`` returned."""
    pair = []
    for _ in range(2):
        model = nn.ParameterList(parameters("float32", SHAPES))
        pair.append(ng.prepare(model, f"bfloat16/{storage}", lr=1e-2)[1])
    kept, replaced = pair
    (group,) = replaced.param_groups
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    with refused("parameters that were replaced"):
        take_steps(replaced, range(1))
    pass_states_on(replaced)
    for optimizer in pair:
        take_steps(optimizer, range(3))
    assert_same_bits(everything(kept), everything(replaced))
    group["params"][0] = narrow(*SHAPES[0])
    with refused("other values in their place"):
        pass_states_on(replaced)


@pytest.mark.parametrize("count", [9, torch.tensor(9), torch.tensor(9.0, dtype=torch.float64)])
def test_a_count_of_any_kind_goes_on(count):
    """A kernel reads and writes float32."""
    optimizer = trained("word")
    optimizer.compile = None
    first = parameters_of(optimizer)[0]
    optimizer.state[first]["step"] = count
    take_steps(optimizer, range(2))
    assert float(optimizer.state[first]["step"]) == 11.0


@pytest.mark.parametrize(
    ("storage", "place", "damaged"),
    [("word", 0, "packed"), ("compact", 0, "exp_avg_sq_bound"), ("collage-plus", 1, "exp_avg_sq_low")],
)  # fmt: skip
def test_an_unfit_state_is_refused_and_nothing_is_lost(storage, place, damaged):
    """Without a tensor, with one of another shape, of another window or storage."""
    optimizer = trained(storage)
    state = trained(storage).state_dict()
    entry = state["state"][place]
    entry[damaged] = torch.zeros(3, dtype=entry[damaged].dtype)
    with unchanged(optimizer), refused("a shape"):
        optimizer.load_state_dict(state)
    del entry[damaged]
    with unchanged(optimizer), refused("a state without a tensor", name=damaged):
        optimizer.load_state_dict(state)
    if storage == "word":
        entry["window"] = torch.tensor(-54.0)
        with unchanged(optimizer), refused("another window"):
            optimizer.load_state_dict(state)
    of_another = refused("a state of another storage", before="naive", after=storage)
    with unchanged(optimizer), of_another:
        optimizer.load_state_dict(trained("naive").state_dict())
    take_steps(optimizer, range(3, 5))
    assert_same_bits(everything(trained(storage, steps=5)), everything(optimizer))


@STORED
def test_a_state_dict_copies_nothing(storage):
    optimizer = trained(storage)
    saved = optimizer.state_dict()["state"]
    for k, p in enumerate(parameters_of(optimizer)):
        for name, tensor in optimizer.state[p].items():
            assert saved[k][name].data_ptr() == tensor.data_ptr(), name


def test_a_float32_moment_may_be_changed_in_place_and_a_packed_one_refuses():
    exact, word = trained("exact"), trained("word")
    (first, *_), (packed, *_) = parameters_of(exact), parameters_of(word)
    exact.state[first]["exp_avg"].zero_()
    assert not exact.stored(first, "exp_avg").any()
    with pytest.raises(KeyError, match=r"optimizer\.stored"):
        word.state[packed]["exp_avg"].zero_()


def test_a_state_given_to_another_rules_optimizer_is_stepped_by_that_rule():
    """As a script does that keeps the moments when it goes from Adam to AdamW."""
    outcomes = []
    for is_copied in (False, True):
        adam = trained("word", rule="adam")
        adamw = build("adamw", parameters_of(adam), "word", lr=1e-3, weight_decay=0.5)
        for parameter, state in adam.state.items():
            adamw.state[parameter] = dict(state) if is_copied else state
        take_steps(adamw, range(2))
        outcomes.append(everything(adamw))
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("storage", ["float16/split", "float16/master", "word"])
@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_a_float32_gradient_of_a_16_bit_weight_is_read_as_it_is(storage, size):
    dtype = getattr(torch, STORAGES[storage].visible)
    moved = []
    for visible in (dtype, torch.float32):
        weight = nn.Parameter(torch.ones(4, 4, dtype=visible))
        weight.grad_dtype = torch.float32
        name = storage if visible is dtype else "float32"
        optimizer = ng.AdamW(
            [weight], lr=1e-3, eps=0.0, weight_decay=0.0, storage=name, low_bits="zero"
        )
        weight.grad = torch.full((4, 4), size)
        optimizer.step()
        moved.append(optimizer.stored(weight) - 1)
    assert moved[0].isfinite().all()
    torch.testing.assert_close(moved[0].mean(), moved[1].mean(), rtol=0.1, atol=0)
