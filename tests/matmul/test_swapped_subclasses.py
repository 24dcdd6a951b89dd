"""Linear layers of other classes: which are swapped, and that nothing is left computing as before without a word."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.linear import DeferredLinear, Linear, is_linear
from narrowgauge.matmul.swapping import linears_of, swap_linears


class Named(nn.Linear):
    """A framework's layer that adds to nn.Linear and multiplies as it does."""

    def tag(self) -> str:
        return f"{self.in_features} to {self.out_features}"


class Own(nn.Linear):
    """A layer with a product of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def same_weights(kind: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(32, 16, dtype=torch.bfloat16))


def test_a_subclass_that_multiplies_as_its_base_is_swapped_and_keeps_what_it_adds() -> None:
    plain, named = same_weights(nn.Linear), same_weights(Named)
    for model in (plain, named):
        swap_linears(model, "int8-row")
    layer, x = named[0], torch.randn(4, 32).bfloat16()
    assert isinstance(layer, Linear) and isinstance(layer, Named) and layer.tag() == "32 to 16"
    assert torch.equal(named(x), plain(x))
    swap_linears(named, "bfloat16")
    assert type(named[0]) is type(layer) and layer.compute.name == "bfloat16"


def test_a_swapped_subclass_can_be_copied_pickled_and_saved() -> None:
    named, x = same_weights(Named), torch.randn(4, 32).bfloat16()
    swap_linears(named, "float8-delayed")
    named(x).float().sum().backward()
    torch.save(named, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    expected = named(x)
    for twin in (copy.deepcopy(named), pickle.loads(pickle.dumps(named)), saved):
        assert type(twin[0]) is type(named[0]) and twin[0].tag() == "32 to 16"
        assert torch.equal(twin(x), expected) and twin[0].weight is not named[0].weight


def test_a_subclass_with_a_product_of_its_own_is_left_alone() -> None:
    attention = nn.MultiheadAttention(8, 2)  # reads its projection's weight without calling it
    assert not is_linear(same_weights(Own)[0]) and not is_linear(attention.out_proj)
    with pytest.raises(RecipeError, match="no linear layer"):
        swap_linears(same_weights(Own), "int8-row")


def test_a_layer_whose_forward_a_framework_has_replaced_is_refused() -> None:
    model = same_weights(nn.Linear)
    bound = model[0].forward
    model[0].forward = lambda input: bound(input)
    with pytest.raises(RecipeError, match="'0' was to compute as 'int8-row', and a framework has replaced its forward"):
        swap_linears(model, "int8-row")


def test_a_deferred_layer_computes_narrowly_through_a_forward_that_was_bound_before() -> None:
    plain, deferred = same_weights(nn.Linear), same_weights(DeferredLinear)
    x = torch.randn(4, 32).bfloat16()
    assert torch.equal(deferred(x), plain(x))
    bound = deferred[0].forward
    deferred[0].forward = lambda input: bound(input)
    for model in (plain, deferred):
        swap_linears(model, "int8-row")
    wide = nn.functional.linear(x, plain[0].weight, plain[0].bias)
    assert torch.equal(deferred(x), plain(x)) and not torch.equal(deferred(x), wide)


def test_a_checkpoint_around_a_block_or_a_layer_does_not_change_its_random_bits() -> None:
    plain, of_block, of_layer = (nn.Sequential(same_weights(nn.Linear)) for _ in range(3))
    of_block[0], of_layer[0][0] = checkpoint_wrapper(of_block[0]), checkpoint_wrapper(of_layer[0][0])  # type: ignore[index, operator]
    models = (plain, of_block, of_layer)
    for model in models:
        swap_linears(model, "int8-row")
    handles = [linears_of(model) for model in models]
    one, *others = (next(iter(handle.layers.values())) for handle in handles if handle is not None)
    assert [torch.equal(one.state, other.state) for other in others] == [True, True]
