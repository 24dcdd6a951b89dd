"""Adapters of PEFT in our storages, over a base that is quantized or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from integrations.own_trainer import OwnRun, reference
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.quantization import padded, quantize

peft = pytest.importorskip(
    "peft", reason="narrowgauge[huggingface] is not installed: ./dev test integrations installs it"
)

from narrowgauge.integrations.peft import FrozenLinear, dequantize_base, quantize_base  # noqa: E402

FORMATS = ("int8-outlier-codes", "float8-row", "nvfp4", "mxfp4")


def adapted(model: nn.Module, **options: Any) -> Any:
    """LoRA adapters, the same at each call, whose second half is not zero, so that all of them have gradients."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config).train()


def trained(run: OwnRun, model: nn.Module, optimizer: Any) -> list[float]:
    """The losses of four steps on the reference's first batch."""
    losses = []
    for tokens in run.batches[:1] * 4:
        loss = run.loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module, mark: str = "lora_") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if mark in name}


@pytest.mark.parametrize("compute", [None, *FORMATS])
def test_only_adapters_train_and_only_they_have_states(compute: str | None) -> None:
    run = reference()
    model = adapted(run.model())
    before = ng.matmul.inference_bytes(model).after
    if compute:
        assert quantize_base(model, compute) is model and model.training
    model, optimizer = ng.prepare(model, "bfloat16/word", lr=1e-2)
    frozen, adapters = weights_of(model, "base_layer"), weights_of(model)
    losses = trained(run, model, optimizer)
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, frozen[name]) for name, value in weights_of(model, "base_layer").items())
    assert not any(torch.equal(value, adapters[name]) for name, value in weights_of(model).items())
    owned = {name for names in optimizer.param_groups for name in names["param_names"]}
    assert owned == set(adapters) and len(optimizer.state_dict()["state"]) == len(adapters)
    assert {str(p.dtype) for p in adapters.values()} == {"torch.bfloat16"}
    if compute:
        # All linear layers but the head; those of the adapters are not among them.
        assert sum(isinstance(module, FrozenLinear) for module in model.modules()) == 14
        assert ng.matmul.inference_bytes(model).after < 0.55 * before


@pytest.mark.parametrize("compute", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_flow_through_the_quantized_base(compute: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(40, 24).requires_grad_(False), torch.randn(2, 8, 40).to(dtype)
    exact = nn.functional.linear(x, linear.weight.to(dtype), linear.bias.to(dtype))
    quantize_base(nn.Sequential(linear), compute)
    layer: Any = linear  # the same object
    x.requires_grad_()
    y, grad = layer(x), torch.randn(2, 8, 24).to(dtype)
    assert y.dtype is dtype and y.shape == exact.shape
    y += 0.0  # as adapters add to it, in place
    y.backward(grad)
    wanted = (grad.float() @ layer.dequantize()).to(dtype)
    assert x.grad is not None and torch.allclose(x.grad, wanted, rtol=2**-7, atol=2**-7)
    error = (y.float() - exact.float()).norm() / exact.float().norm()
    assert 0 < error < (0.15 if "4" in compute else 0.05)
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def test_a_compiled_model_over_codes_is_one_graph_with_the_same_bits() -> None:
    """Without a code generator, which would round sums in another order: what is asked is that PyTorch can trace it."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False)).bfloat16()
    model: Any = peft.get_peft_model(
        layers, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False), autocast_adapter_dtype=False
    )
    quantize_base(model.base_model.model[0], "int8-outlier-codes")
    quantize_base(model.base_model.model[2], "nvfp4")
    x, found = torch.randn(16, 64, dtype=torch.bfloat16) * 4, []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x)
        y.float().square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.requires_grad)])
        model.zero_grad()
    assert len(found[0]) == 5 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_codes_are_those_of_the_compute_and_two_share_a_byte() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(50, 6, bias=False).requires_grad_(False)  # no whole number of blocks
    linear.weight[0, :7] = torch.tensor([0.0, -0.0, 6.0, -6.0, 0.5, -3.0, 1.5])
    weight = linear.weight.detach().clone()
    quantize_base(nn.Sequential(linear), "nvfp4")
    layer: Any = linear
    assert layer.weight_codes.shape == (6, 32) and layer.weight_scales.dtype is torch.float8_e4m3fn
    right = ng.spec.COMPUTES["nvfp4"].output.right
    assert torch.equal(layer.dequantize(), values_of(weight, right))


def values_of(weight: Tensor, right: Any) -> Tensor:
    """What a cast makes of a weight."""
    return quantize(padded(weight, right, 1), right).values()[: weight.shape[0], : weight.shape[1]]


def test_a_bias_that_trains_has_its_gradient() -> None:
    linear: Any = nn.Linear(32, 16)
    linear.weight.requires_grad_(False)
    quantize_base(nn.Sequential(linear), "int8-row")
    linear(torch.ones(3, 32)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((16,), 3.0))


def test_adapters_are_saved_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    run = reference()

    def made() -> Any:
        return ng.prepare(quantize_base(adapted(run.model()), "nvfp4"), "bfloat16/word", lr=1e-2)

    model, optimizer = made()
    trained(run, model, optimizer)
    model.save_pretrained(tmp_path)
    saved = optimizer.state_dict()
    assert {path.suffix for path in tmp_path.iterdir()} >= {".safetensors", ".json"}
    expected = trained(run, model, optimizer)
    again, resumed = made()
    again.load_adapter(tmp_path, "default", is_trainable=True, autocast_adapter_dtype=False)
    resumed.load_state_dict(saved)
    assert trained(run, again, resumed) == expected
    loaded = peft.PeftModel.from_pretrained(run.model(), tmp_path)
    stored = weights_of(peft.PeftModel.from_pretrained(run.model(), tmp_path, is_trainable=True))
    assert weights_of(loaded).keys() == stored.keys() == weights_of(model).keys()


def test_merging_needs_weights_and_gets_them_back() -> None:
    run = reference()
    model = adapted(run.model())
    ng.prepare(quantize_base(model, "nvfp4"), "bfloat16/word")
    model.eval()
    with torch.no_grad():
        apart = run.loss(model, run.batches[0])
    with pytest.raises(RecipeError, match=r"the weight of a layer quantized as 'nvfp4' was requested.*dequantize_base"):
        model.merge_adapter()
    dequantize_base(model)
    assert not any(isinstance(module, FrozenLinear) for module in model.modules())
    model.merge_adapter()
    with torch.no_grad():
        merged = run.loss(model, run.batches[0])
    model.unmerge_adapter()
    assert abs(merged - apart) < 0.02
    plain: Any = model.merge_and_unload()
    assert not weights_of(plain)
    with torch.no_grad():
        assert abs(run.loss(plain, run.batches[0]) - apart) < 0.02


def test_a_base_prepared_before_its_adapters_trains_much_as_one_prepared_after() -> None:
    run = reference()
    after, optimizer = ng.prepare(adapted(run.model()), "bfloat16/word", lr=1e-2)
    expected = trained(run, after, optimizer)
    prepared, _ = ng.prepare(run.model(), "bfloat16/word")
    model, own = ng.prepare(adapted(prepared), "bfloat16/word", lr=1e-2)  # PEFT takes our layers for nn.Linear
    losses = trained(run, model, own)
    # Not the same bits: beside bfloat16 weights PEFT makes adapters in bfloat16, and their tails begin at zero.
    assert losses[-1] < losses[0] and all(abs(a - b) < 0.01 for a, b in zip(losses, expected, strict=True))


def test_float32_adapters_train_in_float32_and_narrow_ones_where_peft_leaves_them() -> None:
    run = reference()

    def losses(storage: str, **options: Any) -> list[float]:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(run.model().bfloat16(), config, **options).train()
        mine = [p for p in model.parameters() if p.requires_grad]
        return trained(run, model, ng.AdamW(mine, lr=1e-2, storage=storage))

    wide, narrow = losses("float32"), losses("word", autocast_adapter_dtype=False)
    assert all(abs(a - b) < 0.02 for a, b in zip(wide, narrow, strict=True))
    with pytest.raises(RecipeError, match=r"storage 'word' holds bfloat16 weights.*storage='float32' takes it"):
        losses("word")


def test_an_adapter_that_is_cast_when_it_is_loaded_is_found(tmp_path: Path) -> None:
    run = reference()
    model, optimizer = ng.prepare(adapted(run.model()), "bfloat16/word", lr=1e-2)
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "default", is_trainable=True, autocast_adapter_dtype=False)
    assert not [each for each in ng.check(model, optimizer) if each.severity == "error"]
    model.load_adapter(tmp_path, "default", is_trainable=True)
    found = next(each for each in ng.check(model, optimizer) if each.severity == "error")
    assert found.name == "recast-parameters" and "12 parameters" in found.message and "load_adapter" in found.advice


def test_float32_adapters_keep_their_format_beside_moments_of_8_bits(tmp_path: Path) -> None:
    """As PEFT makes them over a bfloat16 base: stepped, saved and loaded, resumed, merged and unmerged."""
    run, rank = reference(), 4

    def made(seed: int = 1) -> tuple[Any, ng.AdamW]:
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(run.model().bfloat16(), config).train()
        mine = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return model, ng.AdamW(mine, lr=1e-2, storage="float32-states8")

    model, optimizer = made()
    before = weights_of(model)
    losses = trained(run, model, optimizer)
    assert losses[-1] < losses[0] and {p.dtype for p in weights_of(model).values()} == {torch.float32}
    assert not any(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    adapters = weights_of(model).values()
    # Weight, gradient and two moments of a byte, and two scales a row: of the second matrices, a row has `rank` elements.
    wanted = sum(10 * p.numel() + 8 * p.shape[0] for p in adapters) / sum(p.numel() for p in adapters)
    assert optimizer.bytes_per_param() == pytest.approx(wanted, rel=1e-12) and wanted < 12

    model.save_pretrained(tmp_path)
    saved = optimizer.state_dict()
    again, resumed = made(seed=2)
    own = {id(p) for p in again.parameters() if p.requires_grad}
    again.load_adapter(tmp_path, "default", is_trainable=True)  # float32 already, so nothing takes their place
    assert {id(p) for p in again.parameters() if p.requires_grad} == own
    resumed.load_state_dict(saved)
    assert trained(run, again, resumed) == trained(run, model, optimizer)
    assert all(torch.equal(value, weights_of(model)[name]) for name, value in weights_of(again).items())

    bases = weights_of(model, "base_layer")
    model.merge_adapter()
    assert not any(
        torch.equal(value, bases[name]) for name, value in weights_of(model, "base_layer").items() if "q_proj" in name
    )
    model.unmerge_adapter()
    assert all(
        torch.allclose(value, bases[name], atol=2**-7) for name, value in weights_of(model, "base_layer").items()
    )
    assert not weights_of(model.merge_and_unload())


@pytest.mark.parametrize(
    ("config", "works"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_rslora=True), True),
        (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), True),
        (peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]), True),
        (peft.AdaLoraConfig(init_r=4, target_r=2, total_step=20, tinit=2, tfinal=4, target_modules=["q_proj"]), True),
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), False),
        (peft.LoHaConfig(r=4, target_modules=["q_proj"]), False),
    ],
    ids=["rslora", "head", "ia3", "adalora", "dora", "loha"],
)
def test_other_adapters_train_over_codes_or_are_refused_in_a_line(config: Any, works: bool) -> None:
    run = reference()
    model, optimizer = ng.prepare(
        quantize_base(peft.get_peft_model(run.model(), config), "nvfp4"), "bfloat16/word", lr=1e-2
    )
    model.train()
    if works:
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        assert all(loss < 10 for loss in trained(run, model, optimizer))
        after = dict(model.named_parameters())
        assert before and not any(torch.equal(value, after[name]) for name, value in before.items())
    else:
        with pytest.raises(NarrowgaugeError, match=r"quantized as 'nvfp4'.*need whole weights"):
            trained(run, model, optimizer)


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"no frozen linear layer to quantize\..*get_peft_model"):
        quantize_base(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(RecipeError, match="not 8-bit codes"):
        quantize_base(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), "bfloat16")
    first = quantize_base(reference().model().requires_grad_(False), "nvfp4")
    with pytest.raises(RecipeError, match="add adapters before quantize_base"):
        adapted(first)
