"""Inference from codes: the training layer's own output, in a byte a parameter, saved and loaded."""

import operator
import warnings

import pytest
import torch
from torch import Tensor, nn

import expectations
from matmul import zoo
from narrowgauge.matmul.inference import QuantizedLinear, quantize_for_inference
from narrowgauge.matmul.swapping import swap_linears
from tensors import gaussian
from text.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")

SERVED = [name for name, row in expectations.COMPUTES.items() if "served" in row.has]
IN, OUT = 168, 40  # whole blocks of neither 32 nor 128


def holder(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"fc": nn.Linear(IN, OUT, bias=bias, dtype=dtype)})


def inputs(*shape: int, outliers: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, IN, generator=draw)
    x[..., 5 : 5 + outliers] *= 60
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", SERVED)
def test_the_output_is_that_of_the_layer_in_training(row, dtype):
    trained = holder(dtype)
    model = holder(dtype)
    swap_linears(trained, row)
    quantize_for_inference(model, row)
    x = inputs(3, 7, dtype=dtype, outliers=6)
    y = model["fc"](x)
    assert y.dtype == dtype and torch.equal(y, trained["fc"](x))
    quantize_for_inference(trained, row)  # a narrow layer is taken as a plain one is
    assert torch.equal(trained["fc"](x), y)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_that_of_a_frozen_weight(compiled):
    """In place too, as adapters add to an output; and of no rows."""
    model = holder()
    plain = holder()["fc"]
    layer = quantize_for_inference(model)["fc"]
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for rows in (5, 0):
        x = inputs(2, rows, outliers=2).requires_grad_()
        grad = gaussian(2, rows, OUT).bfloat16()
        layer.zero_grad()
        y = run(x)
        exact = plain(x).float()
        assert (y - exact).norm() <= 0.15 * exact.norm()
        y += 0.0
        y.backward(grad)
        assert torch.equal(x.grad, grad @ layer.dequantize().bfloat16())
        assert not rows or torch.equal(layer.bias.grad, grad.sum((0, 1)))


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[QuantizedLinear]:
    """Return a list of the layers whose weights were widened, in turn."""
    layers = []
    dequantize = QuantizedLinear.dequantize
    monkeypatch.setattr(
        QuantizedLinear, "dequantize", lambda layer: layers.append(layer) or dequantize(layer)
    )
    return layers


@pytest.mark.parametrize(("name", "reads"), [("Mamba", 2), ("Jamba", 1)])
def test_a_product_by_a_stored_weight_is_told(name, reads, widened):
    """A product that the model's own code makes has no cast, in training neither: its layer stays
    wide.
    """
    model = quantize_for_inference(zoo.build(name).bfloat16(), "int8-row")
    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        model(**zoo.inputs_of(name))
    told = [str(warning.message) for warning in caught if "own code" in str(warning.message)]
    assert len(widened) == len(told) == reads
    assert all('keep=("*.dt_proj",)' in line for line in told)
    trained, served = (zoo.build(name).bfloat16().eval() for _ in range(2))
    swap_linears(trained, "int8-row", keep=("*.dt_proj",))
    quantize_for_inference(served, "int8-row", keep=("*.dt_proj",))
    with torch.no_grad():
        y = served(**zoo.inputs_of(name)).logits
        assert torch.equal(y, trained(**zoo.inputs_of(name)).logits)


def test_a_model_that_scales_its_weights_scales_their_codes():
    trained, served = (zoo.build("RWKV").bfloat16().eval() for _ in range(2))
    swap_linears(trained, "int8-row")
    quantize_for_inference(served, "int8-row")
    with torch.no_grad():
        y = served(**zoo.inputs_of("RWKV")).logits
        assert torch.equal(y, trained(**zoo.inputs_of("RWKV")).logits)


def test_a_stored_weight_says_what_it_is_without_being_widened(
    widened,
):
    weight = quantize_for_inference(holder(), "int8-row")["fc"].weight
    plain = holder()["fc"].weight.detach()
    for ask in (
        lambda w: (w.shape, w.dtype, w.device, w.ndim, w.is_meta, w.grad, w.layout, w.nbytes),
        lambda w: (len(w), w.numel(), w.size(1), w.dim(), w.element_size(), w.type()),
        lambda w: (w.T.shape, w.t().dtype, w.data.shape, w.unsqueeze(0).ndim, w.float().dtype),
        lambda w: (w.to(torch.float64).T.dtype, w.reshape(-1).shape, w.detach().requires_grad),
    ):
        assert ask(weight) == ask(plain)
    assert weight.data_ptr() == weight.layer.weight_codes.data_ptr()
    assert not widened


@pytest.mark.parametrize("product", [
    lambda x, w: x @ w.T,
    lambda x, w: torch.mm(x, w.t()),
    lambda x, w: nn.functional.linear(x.float(), w.float()),
    lambda x, w: torch.einsum("ti,oi->to", x, w.data),
    lambda x, w: torch.addmm(torch.zeros(OUT, dtype=x.dtype), x, w.transpose(0, 1)),
])  # fmt: skip
def test_a_product_by_a_form_of_a_stored_weight_is_told(
    product,
):
    layer = quantize_for_inference(holder(), "int8-row")["fc"]
    with pytest.warns(UserWarning, match=r'keep=\("\*\.fc",\)'):
        y = product(inputs(3), layer.weight)
    assert torch.equal(y, product(inputs(3), layer.dequantize().bfloat16()))


def test_a_change_of_a_stored_weight_is_refused_however_it_is_made():
    layer = quantize_for_inference(holder(), "int8-row")["fc"]
    assert torch.equal(torch.zeros(OUT, IN).copy_(layer.weight), layer.dequantize().bfloat16())
    for change in (
        lambda: layer.weight.data.add_(1),
        lambda: operator.setitem(layer.weight, 0, 1),
        lambda: torch.add(layer.weight.float(), 1, out=layer.weight),
        lambda: layer.weight.copy_(torch.zeros(OUT, IN)),
        lambda: nn.init.zeros_(layer.weight),
        lambda: layer.weight.mul_(other=2.0),
        lambda: layer.weight.div_(2.0, rounding_mode="floor"),
        lambda: setattr(layer.weight, "data", torch.zeros(OUT, IN)),
    ):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), refused("a change of codes"):
                change()


def replaced(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: x  # as accelerate's hooks do
    return layer


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (replaced, "a layer that was replaced"),
        (torch.nn.utils.parametrizations.weight_norm, "a weight that is computed"),
    ],
)
def test_a_layer_that_is_more_than_its_weight_is_refused_before_any_change(change, line):
    encoder = nn.TransformerEncoderLayer(32, 4, 64)
    model = nn.Sequential(nn.Linear(32, 32), change(nn.Linear(32, 32)), encoder)
    with refused(line):
        quantize_for_inference(model, "int8-row")
    assert type(model[0]) is nn.Linear
    assert encoder.activation_relu_or_gelu == 1  # PyTorch's own kernel still takes it
