"""The one Linear: every row against the straight-through oracle, and everything a training loop
does around it.
"""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from matmul.scenarios import (
    EIGHT,
    ROWS,
    assert_exact,
    gaussian,
    make_layer,
    names,
    passed,
    same,
)  # fmt: skip
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product
from narrowgauge.spec.formats import FORMATS
from processors import pretending
from tables import exhaustive
from text.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
every_one_of_eight = pytest.mark.parametrize("row", EIGHT, **names)
# [tokens, in, out]: no whole blocks, one token, more than a block.
SHAPES = [(33, 65, 17), (1, 40, 3), (140, 34, 20)]


def batch(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    tokens, inputs, outputs = shape
    x = gaussian(tokens, inputs, dtype=dtype, seed=3)
    return x, gaussian(tokens, outputs, dtype=dtype, seed=4)


# ── the arithmetic ────────────────────────────────────────────────────────────────────────────────


GROUPS = ("tensor", "row", "1x16", "16x16", "1x32", "1x64", "1x128", "128x128", "1x256")


def every_cast() -> Iterator[Cast]:
    """Each cast to nearest of the formats that matmuls take, of each granularity and scale that
    :class:`Cast` accepts.
    """
    for format in FORMATS.values():
        if format.kind == "scale" or format.bits > 8:
            continue
        for granularity in GROUPS:
            for scale in ("float32", "float8_e8m0fnu", "float8_e4m3fn"):
                with suppress(RecipeError):
                    yield Cast(format.name, granularity, scale)


def every_row() -> Iterator[Compute]:
    """All computes of the table, and one of each cast with itself, of rotated operands that share
    scales otherwise, and of operands that are padded to blocks of other lengths.
    """
    yield from ROWS
    wide = COMPUTES["bfloat16"].output
    yield replace(COMPUTES["mxfp8"], name="mine", grad_input=wide, grad_weight=wide)
    products = [Product(cast, cast) for cast in every_cast()]
    rotated = (
        Cast("int8", "row", rotation="hadamard"),
        Cast("float8_e4m3fn", "tensor", rotation="hadamard"),
        Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu", rotation="hadamard"),
    )
    padded = (
        (Cast("bfloat16"), replace(rotated[2], rotation="none")),
        (Cast("int8", "1x16"), Cast("int8", "1x128")),
    )
    for left, right in (*itertools.product(rotated, rotated), *padded):
        products += [Product(left, right), Product(right, left)]
    for product in products:
        yield Compute(f"own {product}", *(product,) * 3, purpose="", source="")


@exhaustive("row", every_row())
def test_a_product_is_the_exact_product_of_its_casts(row):
    for shape, dtype in ((SHAPES[2], torch.bfloat16), (SHAPES[1], torch.float32)):
        assert_exact(row, shape, dtype)


@exhaustive("sets", [("avx512_bf16",), ()])
def test_so_it_is_on_other_processors(sets):
    with pretending(*sets):
        for row, dtype in itertools.product(ROWS, (torch.float32, torch.bfloat16)):
            assert_exact(row, (70, 130, 20), dtype)


# ── as a module ───────────────────────────────────────────────────────────────────────────────────


@every_one_of_eight
@pytest.mark.parametrize("requires_grad", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_gradients_are_those_wanted_and_no_others(row, requires_grad):
    x, grad = batch(SHAPES[0])
    reference = passed(make_layer(row)[0], x, grad)
    layer, _ = make_layer(row)
    leaves = [x.clone(), layer.weight, layer.bias]
    for leaf, needed in zip(leaves, requires_grad, strict=True):
        leaf.requires_grad_(bool(needed))
    y = layer(leaves[0])
    y.backward(grad)
    assert torch.equal(y.detach(), reference.output)
    for leaf, needed, value in zip(leaves, requires_grad, reference[1:], strict=True):
        assert (leaf.grad is None) == (not needed)
        assert leaf.grad is None or torch.equal(leaf.grad, value)


@every_one_of_eight
def test_autocast_is_the_stream_s_dtype_and_changes_no_product(row):
    layer, _ = make_layer(row, dtype=torch.float32)
    x = batch(SHAPES[0])[0]
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x.float())
        narrow = layer(x)
    assert inside.dtype is torch.bfloat16 and torch.equal(inside, narrow)


def test_autocast_does_not_round_values_with_float32_scales():
    cast = Cast("float8_e4m3fn", "1x32")
    row = Compute("float32 scales", *(Product(cast, cast),) * 3, purpose="", source="")
    layer, _ = make_layer(row, dtype=torch.float32, bias=False)
    x = batch(SHAPES[0])[0]
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert torch.equal(inside, layer(x.float()).bfloat16())


def test_small_inputs_lose_nothing_in_the_weight_s_gradient():
    """Their scales are multiplied into the gradient, near one."""
    layer, _ = make_layer("int8-row", 64, 48, bias=False)
    x, grad = gaussian(128, 64, seed=3), gaussian(128, 48, seed=4)
    errors = []
    for scale in (1.0, 2.0**-99):
        result = passed(layer, x * scale, grad).grad_weight.double() / scale
        exact = grad.double().t() @ x.double()
        errors.append(float((result - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.05


# ── swapping and the handle ───────────────────────────────────────────────────────────────────────


def test_patterns_hold_under_a_wrapper_and_a_transform_is_no_swap():
    names = ("q_proj", "k_proj", "v_proj", "lm_head")
    model = nn.ModuleDict({name: nn.Linear(64, 48) for name in names})
    compiled = torch.compile(model)
    kept = swap_linears(compiled, "float8-row", keep=("*_head", "[kv]_*"))
    assert kept.layers.keys() == {"_orig_mod.q_proj"}
    for compute in ("scalify", "scalify-float16"):
        with refused("a swap to scalify"):
            swap_linears(model, compute)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_only_layers_of_a_linear_layer_s_own_forward_are_swapped():
    model = nn.ModuleDict({
        "encoder": nn.TransformerEncoderLayer(32, 2, 64), "halved": Halved(32, 32),
        "normed": torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "lm_head": nn.Linear(32, 7),
    })  # fmt: skip
    linears = swap_linears(model, lambda name: None if name == "lm_head" else "float8-row")
    assert linears.layers.keys() == {"encoder.linear1", "encoder.linear2", "normed"}
    assert str(linears) == "3 layers are narrow; wide: lm_head (by choice)"
    assert str(swap_linears(nn.Linear(32, 32), "bfloat16")) == "0 layers are narrow"


# ── compiled ──────────────────────────────────────────────────────────────────────────────────────


def test_a_compiled_layer_gives_the_same_bits_and_compiles_once():
    """The casts fuse with the products around the layer, whose results are rounded first all the
    same.
    """
    torch._dynamo.reset()
    eager, _ = make_layer("float8-tensor")
    layer, _ = make_layer("float8-tensor")
    call = torch.compile(
        lambda x: layer(x * 1.3) * 0.7,
        fullgraph=True,
        options={"cpp.vec_isa_ok": True, "emulate_precision_casts": True},
    )
    for step in range(3):
        x = gaussian(2, 12, 65, seed=step)
        grad = gaussian(2, 12, 17, seed=step + 50)
        reference = passed(eager, x, grad, lambda x: eager(x * 1.3) * 0.7)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            assert same(passed(layer, x, grad, call), reference)


# ── what models do around a layer ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "compute", ["bfloat16", "float8-tensor", "float8-block", "int8-row", "mxfp8", "nvfp4"]
)
def test_a_model_may_change_an_output_in_place(compute):
    model = nn.Sequential(nn.Linear(40, 24)).bfloat16()
    swap_linears(model, compute)
    y = model(torch.randn(5, 40).bfloat16())
    y += 1
    torch.relu_(y).float().sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("keep", [(), ("0",), ("2",)])
def test_a_second_derivative_is_refused(keep):
    """Casts are detached, so it would lack terms; also where the last layer alone is narrow."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    swap_linears(model, "float8-row", keep=keep)
    x = torch.randn(4, 32, requires_grad=True)
    with refused("a second derivative"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: model(x).square().sum())(x.detach())


def test_a_part_of_a_weight_is_multiplied_by_a_wide_layer_alone(one_rank):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16()
    swap_linears(model, lambda name: "bfloat16" if name == "0" else "mxfp8")
    mesh = init_device_mesh("cpu", (1,))
    x = torch.randn(3, 32).bfloat16()
    expected = F.linear(x, model[0].weight, model[0].bias)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    assert torch.equal(model[0](x), expected)
    with refused("a part of a block"):
        model(x)


def test_a_layer_from_the_meta_device_has_the_keys_of_its_name():
    here, there = (nn.Sequential(nn.Linear(32, 32)) for _ in range(2))
    for model in (here, there.to("meta")):
        swap_linears(model, "int8-row")
    there.to_empty(device="cpu")
    assert torch.equal(there[0].key, here[0].key)


def test_an_encoder_takes_a_mask_of_padding_in_evaluation():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    swap_linears(model, "float8-row")
    is_padding = torch.zeros(2, 3, dtype=torch.bool)
    is_padding[1, 2] = True
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32), src_key_padding_mask=is_padding).shape == (2, 3, 32)
