"""The first bad value of a step: known failures are put into models, and the right operation must be named."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from narrowgauge.gauges.nan_origin.replay import first_bad_value, replay
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.trainer import language_model
from tensors import bits

INF, NAN = math.inf, math.nan


class Layer(nn.Module):
    """A named layer that is any function of its input and one parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4) if weight is None else weight)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def chain(**layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def step_of(model: nn.Module, x: Tensor, call: Callable[..., Any] | None = None) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = (call or model)(x).float().sum()
        loss.backward()
        return loss.detach()

    return step


def linears(width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = {name: nn.Linear(width, width) for name in ("first", "second", "third")}
    return chain(**layers).to(dtype)


# ── in front of all operations ────────────────────────────────────────────────────────────────────────────────────────


def test_a_bad_weight_is_an_input() -> None:
    model = linears()
    with torch.no_grad():
        model.second.weight[3, 5] = NAN
    bad = first_bad_value(model, step_of(model, torch.ones(2, 8)))
    assert bad is not None
    assert (bad.phase, bad.parameter, bad.module, bad.operation) == ("input", "second.weight", "second", "aten.addmm")
    assert (bad.what, bad.num_bad, bad.num_values, bad.place) == ("nan", 1, 64, (3, 5))
    assert bad.reached == "the loss" and bad.tensor == "second.weight"
    assert "second.weight held nan in 1 of 64 values" in bad.message and "update that wrote it" in bad.message


def test_a_bad_row_of_an_embedding_matters_only_if_it_is_read() -> None:
    model = chain(embed=nn.Embedding(10, 4), head=nn.Linear(4, 1))
    with torch.no_grad():
        model.embed.weight[7] = INF
    assert first_bad_value(model, step_of(model, torch.tensor([[1, 2, 3]]))) is None
    bad = first_bad_value(model, step_of(model, torch.tensor([[1, 7, 3]])))
    assert bad is not None
    assert (bad.phase, bad.parameter, bad.what, bad.place) == ("input", "embed.weight", "inf", (7, 0))


def test_a_batch_of_nan_is_an_input() -> None:
    model = linears()
    x = torch.ones(4, 8)
    x[2] = NAN
    bad = first_bad_value(model, step_of(model, x))
    assert bad is not None
    assert (bad.phase, bad.parameter, bad.num_bad, bad.place) == ("input", "argument input", 8, (2, 0))
    assert "batch of this step" in bad.message


# ── forward ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_layer_that_overflows_is_named_with_its_operands() -> None:
    model = linears(dtype=torch.float16)
    with torch.no_grad():
        model.second.weight.fill_(2.0**12)
    bad = first_bad_value(model, step_of(model, torch.full((2, 8), 64.0).half()))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.what, bad.dtype) == (
        "forward",
        "second",
        "aten.addmm",
        "inf",
        "float16",
    )
    weight = next(operand for operand in bad.operands if operand.name == "second.weight")
    assert (weight.dtype, weight.amin, weight.amax, weight.num_nonfinite) == ("float16", 4096, 4096, 0)
    assert "largest finite float16 is 65504" in bad.message and "magnitudes 4.1e+03 to 4.1e+03" in bad.message


def test_a_cast_under_autocast_is_an_operation() -> None:
    model = linears()
    with torch.no_grad():
        model.third.weight[0, 0] = 1e6

    def step() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(2, 8)).float().sum()
        loss.backward()
        return loss

    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.module, bad.operation, bad.dtype, bad.num_bad) == ("third", "aten._to_copy", "float16", 1)
    assert bad.operands[0].name == "third.weight" and bad.operands[0].amax == 1e6


@pytest.mark.parametrize(
    ("make", "operation", "what"),
    [
        (lambda x: (x - x).log(), "aten.log", "inf"),
        (lambda x: torch.complex(x, x).mul(1e39).imag, "aten.mul", "inf"),
        (lambda x: (x - x) / (x - x), "aten.div", "nan"),
        (lambda x: x.mul_(1e38).mul_(10), "aten.mul_", "inf"),
        (lambda x: torch.mul(x, 1e39, out=torch.full_like(x, NAN)), "aten.mul", "inf"),
        (lambda x: torch.empty_like(x).fill_(NAN).copy_(x).add_(3e38).mul_(2), "aten.mul_", "inf"),
        (lambda x: torch.full_like(x, NAN).half().copy_(x * 1e6), "aten.copy_", "inf"),
        (lambda x: (x * 1e39).mul_(2).sub_(x), "aten.mul", "inf"),
        (lambda x: torch.stack([x, x]).mul(1e39).unbind()[0], "aten.mul", "inf"),
        (lambda x: torch._foreach_mul([x, x * 1e38], 1e3)[1], "aten._foreach_mul", "inf"),
        (lambda x: x.to(torch.float8_e5m2).float() * (x * 1e6).to(torch.float8_e5m2).float(), "aten._to_copy", "inf"),
    ],
    ids=[
        "log",
        "complex",
        "zero-by-zero",
        "in-place",
        "out",
        "memory",
        "over-nan",
        "passed-on",
        "view",
        "list",
        "float8",
    ],
)
def test_whatever_way_an_operation_writes(make: Callable[[Tensor], Tensor], operation: str, what: str) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            made = make(x + 1.5)
        return made * weight

    model = chain(before=Layer(torch.mul), bad=Layer(function), after=Layer(torch.mul))
    bad = first_bad_value(model, step_of(model, torch.ones(3, 4)))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.what) == ("forward", "bad", operation, what)
    assert all(operand.num_nonfinite == 0 for operand in bad.operands)


# ── infinities that are meant ─────────────────────────────────────────────────────────────────────────────────────────


def causal(scores: Tensor, how: str) -> Tensor:
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if how == "fill":
        return scores.masked_fill(above, -INF)
    if how == "where":
        return torch.where(above, torch.tensor(-INF), scores)
    if how == "minimum":  # transformers' own: in float16 the sum may be -inf
        return scores + above.to(scores.dtype) * torch.finfo(scores.dtype).min
    return scores + torch.full(scores.shape[-2:], -INF).triu(1).to(scores.dtype)


def attention(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        x = x * weight
        return causal(x @ x.transpose(-1, -2), how).softmax(-1) @ x

    return attend


@pytest.mark.parametrize("how", ["fill", "where", "add", "minimum"])
def test_a_mask_is_not_blamed(how: str) -> None:
    dtype = torch.float16 if how == "minimum" else torch.float32
    model = chain(attention=Layer(attention(how)), later=Layer(lambda x, w: x / (w - 1))).to(dtype)
    x = -torch.arange(12.0).view(1, 3, 4).to(dtype)
    healthy = chain(attention=model.attention)
    assert first_bad_value(healthy, step_of(healthy, x)) is None
    bad = first_bad_value(model, step_of(model, x))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation) == ("forward", "later", "aten.div")


def test_a_mask_given_as_a_tensor_is_not_blamed_but_the_softmax_of_a_row_without_any_place_is() -> None:
    mask = torch.zeros(3, 3)
    mask[1] = -INF
    model = chain(
        softmax=Layer(lambda x, w: (x * w + mask).softmax(-1), torch.ones(3)), after=Layer(torch.mul, torch.ones(3))
    )
    bad = first_bad_value(model, step_of(model, torch.ones(3, 3)))
    assert bad is not None
    assert (bad.module, bad.operation, bad.what, bad.num_bad, bad.place) == (
        "softmax",
        "aten._softmax",
        "nan",
        3,
        (1, 0),
    )
    assert bad.operands[0].num_nonfinite == 3


def test_the_softmax_of_a_row_that_was_filled_whole_is_to_blame() -> None:
    hidden = torch.tensor([[False] * 3, [True] * 3])
    model = chain(softmax=Layer(lambda x, w: (x * w).masked_fill(hidden, -INF).softmax(-1), torch.ones(3)))
    bad = first_bad_value(model, step_of(model, torch.ones(2, 3)))
    assert bad is not None and (bad.operation, bad.num_bad) == ("aten._softmax", 3)


def test_a_mask_of_an_overflow_leaves_the_overflow_to_blame() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        scores = (x * 1e38) * weight * 1e2
        return causal(scores, "fill").softmax(-1)

    model = chain(scores=Layer(function, torch.ones(3)))
    bad = first_bad_value(model, step_of(model, torch.ones(3, 3)))
    assert bad is not None and (bad.operation, bad.what, bad.num_bad) == ("aten.mul", "inf", 9)


def test_what_is_thrown_away_is_not_blamed() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            unused = (x - x).log()
            chosen = torch.where(x > 0, x, unused)
        return chosen * weight

    model = chain(function=Layer(function), later=Layer(lambda x, w: (x * w * 1e30) ** 2))
    assert first_bad_value(chain(f=model.function), step_of(model.function, torch.ones(2, 4))) is None
    bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
    assert bad is not None and (bad.module, bad.operation) == ("later", "aten.pow")


# ── backward ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_root_at_zero_is_bad_in_backward_only() -> None:
    model = chain(first=Layer(torch.mul), root=Layer(lambda x, w: ((x - x) * w).sqrt()), last=Layer(torch.mul))
    bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.what) == ("backward", "root", "aten.div", "inf")
    assert bad.reached.startswith("the gradient of ")


def test_zero_times_infinity_in_backward_goes_back_to_the_infinity() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        return torch.where(y > 0, y, 1 / (y - y))  # forward all of the second is thrown away

    model = chain(first=Layer(torch.mul), hidden=Layer(function), last=Layer(torch.mul))
    bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation) == ("forward", "hidden", "aten.reciprocal")
    assert bad.reached.startswith("the gradient of ")


def test_a_sum_of_micro_batches_that_overflows_names_its_parameter() -> None:
    model = chain(only=Layer(torch.mul)).half()

    def step() -> Tensor:
        for _ in range(3):
            loss = model(torch.full((4,), 3e4).half())
            loss.backward(torch.ones_like(loss))
        return loss.sum() / 1e4

    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.parameter) == ("backward", "only", "aten.add_", "only.weight")
    assert [operand.amax for operand in bad.operands] == [60000, 30000]
    assert bad.reached == "the gradient of only.weight"


def test_a_gradient_that_the_step_itself_takes_away_is_seen() -> None:
    model = chain(root=Layer(lambda x, w: ((x - x) * w).sqrt()))

    def step() -> Tensor:
        loss = step_of(model, torch.ones(2, 4))()
        model.root.weight.grad = None  # as what sums micro-batches elsewhere does
        return loss

    bad = first_bad_value(model, step)
    assert bad is not None and (bad.phase, bad.reached) == ("backward", "the gradient of root.weight")


def test_what_a_checkpoint_computes_again() -> None:
    runs = []

    def fails_again(x: Tensor, weight: Tensor) -> Tensor:
        runs.append(1)
        return torch.sin(x * weight / (2 - len(runs)))  # the second time by zero

    inner, last = Layer(fails_again), Layer(torch.mul)
    model = chain(inner=inner, last=last)
    step = step_of(model, torch.ones(2, 4), lambda x: last(checkpoint(inner, x, use_reentrant=False)))
    bad = first_bad_value(model, step)
    assert bad is not None and len(runs) == 2
    assert (bad.phase, bad.module, bad.operation) == ("backward-recompute", "inner", "aten.div")
    assert "activation checkpointing" in bad.message


def test_backward_of_a_checkpoint_is_named_as_without() -> None:
    inner, last = Layer(lambda x, w: ((x - x) * w).sqrt()), Layer(torch.mul)
    model = chain(inner=inner, last=last)
    step = step_of(model, torch.ones(2, 4), lambda x: last(checkpoint(inner, x, use_reentrant=False)))
    bad = first_bad_value(model, step)
    assert bad is not None and (bad.phase, bad.module, bad.operation) == ("backward", "inner", "aten.div")


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def language_step(model: Any, loss: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    tokens = torch.randint(0, 2048, (2, 17), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        total = torch.zeros(())
        for part in tokens.split(1):
            value = loss(part) / 32
            value.backward()
            total += value.detach()
        return total

    return step


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_language_model_with_one_layer_that_overflows(attention: str, checkpointing: bool) -> None:
    model = language_model.build("llama-1m", seed=0).half()
    model.set_attn_implementation(attention)
    if checkpointing:
        language_model.enable_activation_checkpointing(model)
    step = language_step(model, lambda tokens: language_model.loss_sum(model, tokens, chunked=False))
    assert first_bad_value(model, step) is None
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.fill_(4096.0)
        model.model.layers[2].mlp.gate_proj.weight.abs_().mul_(2.0**14)
    bad = first_bad_value(model, step)
    assert bad is not None
    assert bad.phase == "forward" and bad.module.startswith("model.layers.2.mlp") and bad.dtype == "float16"


def test_a_compiled_model_is_watched_eagerly_and_compiles_nothing_anew() -> None:
    compiler = CompileCounterWithBackend("aot_eager")
    # PyTorch compiles no frame of its own modules; the backend decides nothing here, and this one is quick.
    layers = {name: Layer(F.linear, torch.full((8, 8), 0.25)) for name in ("first", "second", "third")}
    model = chain(**layers).half()
    for layer in model:
        layer.compile(backend=compiler, fullgraph=True)
    head = torch.compile(lambda x: (x.float() * 2).sum(), backend=compiler, fullgraph=True)
    step = step_of(model, torch.ones(2, 8).half(), lambda x: head(model(x)))
    healthy, compiled = step(), compiler.frame_count
    grads = [bits(p.grad).tolist() for p in model.parameters() if p.grad is not None]
    assert compiled > 0
    assert first_bad_value(model, step) is None
    kept = model.second.weight.detach().clone()
    with torch.no_grad():
        model.second.weight.fill_(6e4)
    result = replay(model, step)
    assert result.bad is not None
    assert (result.reproduced, result.bad.module, result.bad.operation) == ("eager", "second", "aten.mm")
    with torch.no_grad():
        model.second.weight.copy_(kept)
    model.zero_grad()
    assert step() == healthy
    assert [bits(p.grad).tolist() for p in model.parameters() if p.grad is not None] == grads
    assert compiler.frame_count == compiled


def test_a_narrow_layer_names_its_row_and_what_went_in() -> None:
    model = chain(first=nn.Linear(32, 32), narrow=nn.Linear(32, 32), last=nn.Linear(32, 32)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        swap_linears(model, "float8-row", keep=())
    step = step_of(model, torch.ones(16, 32).half())
    assert first_bad_value(model, step) is None
    with torch.no_grad():
        model.narrow.weight.fill_(2.0**12)
        model.first.bias.fill_(100.0)
    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation) == ("forward", "narrow", "narrowgauge::multiply_output")
    assert bad.row == "float8-row" and bad.casts == ("output: float8_e4m3fn, per row × float8_e4m3fn, per row",)
    assert {operand.name for operand in bad.operands} >= {"data", "outer", "narrow.weight"}
    assert "Its compute is float8-row" in bad.message


def test_a_narrow_gradient_that_overflows_is_found_in_backward() -> None:
    model = chain(narrow=nn.Linear(32, 32, bias=False)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        swap_linears(model, "float8-row", keep=())

    def step() -> Tensor:
        loss = model(torch.ones(16, 32).half()).float().sum() * 3e4
        loss.backward()
        return loss

    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation) == ("backward", "narrow", "narrowgauge::gradients")
    assert bad.reached == "the gradient of narrow.weight" and len(bad.casts) == 2


def test_memory_that_nothing_was_written_to() -> None:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        model = chain(reads=Layer(lambda x, w: torch.empty_like(x) + x * w))
        bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
        model = chain(writes=Layer(lambda x, w: torch.empty_like(x).zero_() + x * w))
        assert first_bad_value(model, step_of(model, torch.ones(2, 4))) is None
        # A number that PyTorch did not see made: the first bad value is the best guess, and not such memory.
        guess = first_bad_value(model, lambda: float((model(torch.ones(2, 4)) - 2).log().sum().detach().numpy()))
    finally:
        torch.use_deterministic_algorithms(was)
    assert bad is not None and (bad.module, bad.operation) == ("reads", "aten.empty_like")
    assert "uninitialized memory" in bad.message
    assert guess is not None and guess.operation == "aten.log"


def test_a_scalified_model_is_watched_too() -> None:
    from narrowgauge.transforms.scalify import scalify

    model = language_model.build("llama-1m", seed=0)
    del model.model.layers[1:]
    scalify(model)
    step = language_step(model, lambda tokens: language_model.loss_sum(model, tokens, chunked=False))
    assert first_bad_value(model, step) is None
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = NAN
    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.parameter) == ("input", "model.layers.0.mlp.down_proj.weight")


# ── the caller's state ────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_is_put_back() -> None:
    model = chain(first=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), last=nn.Linear(8, 8))
    x = torch.randn(4, 8)
    step_of(model, x)()
    with torch.no_grad():
        model.last.bias.grad[0] = NAN  # of the step that failed
    model.first.bias.grad = None
    grads = {name: p.grad for name, p in model.named_parameters()}
    before = {name: bits(g).tolist() for name, g in grads.items() if g is not None}
    buffers = {name: (b, bits(b.reshape(-1)).tolist()) for name, b in model.named_buffers()}
    weights = [bits(p).tolist() for p in model.parameters()]
    seen = torch.get_rng_state()
    values = []

    def step() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        values.append((loss.item(), torch.rand(()).item()))
        return loss

    assert first_bad_value(model, step) is None
    assert replay(model, step).reproduced == "not"
    assert len(values) == 3 and len(set(values)) == 1  # the same dropout each time
    assert torch.equal(torch.get_rng_state(), seen)
    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert {name: bits(g).tolist() for name, g in grads.items() if g is not None} == before
    assert {name: (id(b), bits(b.reshape(-1)).tolist()) for name, b in model.named_buffers()} == {
        name: (id(b), kept) for name, (b, kept) in buffers.items()
    }
    assert [bits(p).tolist() for p in model.parameters()] == weights
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model = linears()
    grad = model.first.weight.grad = torch.ones(8, 8)

    def step() -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        first_bad_value(model, step)
    assert model.first.weight.grad is grad
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


# ── which of the ways to compute it fails ─────────────────────────────────────────────────────────────────────────────


def test_a_fault_that_does_not_come_back() -> None:
    model, faults, said = linears(), [NAN], []

    def step() -> Tensor:
        loss = model(torch.ones(2, 8)).sum() + (faults.pop() if faults else 0.0)
        loss.backward()
        return loss

    assert step().isnan()
    result = replay(model, step, say=said.append)
    assert result.reproduced == "not" and result.bad is None and len(said) == 2
    assert "transient hardware fault" in result.message


def test_what_eager_reproduces_is_told_at_once() -> None:
    model, said = linears(), []
    with torch.no_grad():
        model.second.weight[0, 0] = NAN
    result = replay(model, step_of(model, torch.ones(2, 8)), say=said.append)
    assert result.reproduced == "eager" and result.bad is not None and len(said) == 1
    assert result.message == result.bad.message


def test_what_only_the_compiled_step_gives() -> None:
    model = linears()

    def compiled_step() -> Tensor:
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        model.third.weight.grad[0, 0] = INF
        return loss

    result = replay(model, step_of(model, torch.ones(2, 8)), compiled_step)
    assert result.reproduced == "compiled" and result.found == ("the gradient of third.weight",)
    assert "only the compiled kernels" in result.message
    assert model.third.weight.grad is None


def test_a_loss_that_comes_as_a_number_is_followed() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.where(x > 0, (x * weight - 2).log(), (x - x).log())

    model = chain(thrown_away=Layer(lambda x, w: torch.where(x > 0, x * w, (x - x).log())), bad=Layer(function))

    def step() -> float:
        return model(torch.ones(2, 4)).sum().item()

    bad = first_bad_value(model, step)
    assert bad is not None and (bad.module, bad.operation, bad.what) == ("bad", "aten.log", "nan")


def test_a_number_that_is_not_finite_is_told_among_the_operands() -> None:
    model = chain(first=Layer(torch.mul), scaled=Layer(lambda x, w: x * w * NAN))
    bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
    assert bad is not None and (bad.module, bad.operation) == ("scaled", "aten.mul")
    assert bad.operands[-1].name == "the number nan"


def test_a_loss_made_outside_of_modules() -> None:
    model = linears()

    def step() -> Tensor:
        loss = F.cross_entropy(model(torch.ones(2, 8)), torch.full((2,), -100))
        loss.backward()
        return loss

    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.module, bad.operation, bad.what) == ("", "aten.nll_loss_forward", "nan")
    assert "outside the model's modules" in bad.message
