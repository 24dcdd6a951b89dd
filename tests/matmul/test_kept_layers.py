"""Which layers stay wide: by what they do, whatever they are called, and however their weights are
stored.
"""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from matmul import zoo
from narrowgauge.errors import RecipeError
from narrowgauge.matmul import NarrowLayers
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.matmul.kept_layers import roles_of
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.torch_support.model_parts import parts
from text.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")


class Mixture(nn.Module):
    """A router that is called anything, experts as a list, and a gate of one output."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.scores = nn.Linear(32, num_experts)
        self.shared = nn.Linear(32, 32)
        self.shared_gate = nn.Linear(32, 1)
        self.members = nn.ModuleList(nn.Linear(32, 32) for _ in range(num_experts))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Lora(nn.Module):
    """As PEFT wraps a layer."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 32)})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(128, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([SwiGlu(), Mixture(), Lora(), SwiGlu()])
        self.to_vocabulary = nn.Linear(32, 128, bias=False)
        self.to_places = nn.Linear(32, 64)
        self.to_vocabulary.weight = self.words.weight


MIDDLE = {
    "blocks.1.scores": "router",
    "blocks.1.shared_gate": "router",
    "blocks.2.lora_A.default": "adapter",
    "blocks.2.lora_B.default": "adapter",
}


def test_roles_are_seen_under_any_name():
    outside = dict.fromkeys(("to_vocabulary", "to_places"), "outside the blocks")
    assert roles_of(Model()) == {**outside, **MIDDLE}


class Denoiser(nn.Module):
    """Without a vocabulary or labels, and as many outputs as blocks."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.into, self.time = nn.Linear(16, 32), nn.Linear(1, 32)
        self.blocks = nn.ModuleList(SwiGlu() for _ in range(num_blocks))
        self.out = nn.Linear(32, num_blocks)
        self.heads = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))


def test_a_matrix_outside_the_blocks_is_not_narrowed():
    linears = swap_linears(Denoiser().bfloat16(), "nvfp4")
    outside = ["into", "time", "out", "heads.0", "heads.1", "heads.2"]
    kept = linears.kept
    assert all(kept[name] == "outside the blocks" for name in outside)
    assert kept["blocks.7.up"] == "last block" and len(linears.layers) == 7 * 3
    assert str(linears).startswith("21 layers are narrow; wide: into (outside the blocks), ")
    assert str(linears).count("(") == 4 and str(linears).endswith(" and 5 more")


def test_a_merged_model_s_layers_have_the_names_that_they_have_now():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up", "out"], r=2)
    model = peft.get_peft_model(Denoiser().bfloat16(), config)
    linears = swap_linears(model, "float8-row")
    plain = model.merge_and_unload()
    names = {name.removeprefix("base_model.model.") for name in (*linears.layers, *linears.kept)}
    expected = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert names == expected


def test_the_last_blocks_stay_wide_where_a_compute_asks():
    last = {"blocks.3.gate", "blocks.3.up", "blocks.3.down"}
    for share, expected in ((0.15, last), (0.5, last | {"blocks.2.base_layer"})):
        roles = roles_of(Model(), share)
        assert {name for name, role in roles.items() if role == "last block"} == expected
    assert roles_of(nn.Linear(4, 4), 0.5) == {}


@pytest.mark.parametrize("compute", ["nvfp4", "float8-row"])
def test_a_model_without_blocks_is_narrow_throughout_and_that_is_said(compute):
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    with pytest.warns(UserWarning, match="Nothing says which modules of this Sequential"):
        linears = swap_linears(model, compute)
    assert set(linears.layers) == {"1", "3"}


def test_a_pattern_adds_to_the_roles_and_one_that_matches_nothing_is_refused():
    linears = swap_linears(Model().bfloat16(), "float8-row", keep=("*.up",))
    assert not {"to_vocabulary", "blocks.1.scores", "blocks.0.up"} & set(linears.layers)
    assert "blocks.0.gate" in linears.layers
    with refused("no layer of that name"):
        swap_linears(Model(), "float8-row", keep=("lm_haed",))
    linears = swap_linears(Model().bfloat16(), lambda _: "float8-row")
    assert {"to_vocabulary", "blocks.1.scores"} <= set(linears.layers)


def test_a_recipe_keeps_them_too():
    model, _ = ng.prepare(Model(), "nvfp4/word")
    layers = NarrowLayers(model).layers
    narrow = {name for name, layer in layers.items() if layer.compute.name == "nvfp4"}
    assert "blocks.0.gate" in narrow and not {"blocks.3.up", "to_vocabulary"} & narrow


# ── structure is not storage ──────────────────────────────────────────────────────────────────────


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.count(".") > 2:
            names.add(name.rpartition(".")[2])
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(names)[:3], r=2))


STEPS = {
    "swap": lambda model: swap_linears(model, "float8-row").model,
    "swap again": lambda model: swap_linears(model, "nvfp4").model,
    "quantize": lambda model: quantize_for_inference(model, "int8-row"),
    "adapt": adapted,
}
ORDERS = (
    ("swap", "swap again", "quantize", "adapt"), ("quantize", "quantize", "swap again"),
    ("adapt", "swap", "quantize"), ("swap", "adapt", "swap again"),
)  # fmt: skip


def places(model: nn.Module, names: dict[nn.Module, str]) -> dict[str, object]:
    """Return the parts that each module of the fresh model belongs to."""
    found = parts(model)
    places = {}
    for module, name in names.items():
        places[name] = module in found.blocks, module in found.routers, module in found.inside
    for experts in found.experts:
        places[f"experts of {names.get(experts.owner)}"] = experts.stacks
    return places


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["Llama", "GPT2", "T5", "Mixtral", "GptOss", "SwitchT", "Mamba", "Jamba", "Whisper", "Blip2"],
)
def test_parts_are_the_same_before_and_after_swaps_codes_and_adapters(name):
    """In any order, and twice. A step may be refused: then the parts are the same too."""
    for order in ORDERS:
        if "adapt" in order and name not in ("Llama", "T5", "Mixtral", "Jamba"):
            continue
        with torch.device("meta"):
            model = zoo.build(name)
        names = {module: name for name, module in model.named_modules()}
        before = places(model, names)
        for step in order:
            with suppress(RecipeError):
                model = STEPS[step](model)
            assert places(model, names) == before, (order, step)


def test_a_served_model_is_not_quantized_again_nor_its_head_narrowed():
    for second in (STEPS["quantize"], STEPS["swap again"]):
        model = quantize_for_inference(zoo.build("SwitchT").bfloat16(), "int8-row")
        with refused("no layer is left", roles="outside the blocks, router"):
            second(model)
        assert type(model.lm_head) is nn.Linear


def test_heads_that_are_small_networks_in_a_list_are_no_blocks():
    """As Medusa's, beside the language model's own head."""
    model = zoo.lm(layers=zoo.blocks())
    model.heads = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 128)) for _ in range(3)
    )
    linears = swap_linears(model.bfloat16(), "nvfp4")
    assert linears.kept["heads.0.2"] == linears.kept["heads.0.0"] == "outside the blocks"
    assert set(linears.layers) == {f"layers.{k}.{name}" for k in range(3) for name in "ab"}


def test_a_model_whose_only_block_stays_wide_is_refused_with_the_reason():
    model = zoo.lm(layers=zoo.blocks(1))
    with refused("no layer is left", roles="last block, outside the blocks"):
        swap_linears(model.bfloat16(), "nvfp4")
