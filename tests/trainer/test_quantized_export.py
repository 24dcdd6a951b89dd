"""Exports as codes: the bits of the quantized model after loading, samples from the folder, and nothing half made or misread."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.matmul.inference import QuantizedLinear, inference_bytes, quantize_for_inference, with_codes
from narrowgauge.matmul.outlier_search import find_outlier_columns, missed_outliers
from narrowgauge.spec.computes import COMPUTES, stored_bytes
from narrowgauge.trainer import exporting, loop, quantized_export, text_sampling
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.quantized_export import export_quantized, load_quantized
from trainer.tiny_runs import call, settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
PAPER = "int8-outlier+threshold=2"


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loop.train(settings(place, tmp_path_factory.mktemp("quantized") / "run", steps=2))


@pytest.fixture(scope="module")
def plain(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exporting.export(run, tmp_path_factory.mktemp("plain") / "out")


def held_out(run: Path, number: int = 64) -> list[torch.Tensor]:
    return [torch.from_numpy(each)[:, :-1] for each in open_data(run).valid_batches(1, 16, number)]


def held_out_like() -> torch.Tensor:
    return torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("row", [PAPER, "int8-outlier-codes", "float8-block"])
def test_what_is_loaded_has_the_bits_of_the_quantized_model(row: str, run: Path, plain: Path, tmp_path: Path) -> None:
    out = export_quantized(run, tmp_path / "deep" / "out", row)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype="auto").eval()
    columns = find_outlier_columns(expected, held_out(run), row) if row == PAPER else None
    quantize_for_inference(expected, row, outlier_columns=columns)
    before = torch.get_rng_state()
    loaded, tokens = load_quantized(out), held_out(run)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert not loaded.training and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    assert inference_bytes(loaded).after == inference_bytes(expected).after
    if columns is not None:
        assert 0 < sum(map(len, columns.values())) < 16 * 14
        assert set(missed_outliers(loaded).values()) == {0}, "the sequences are those that were looked at"


def test_the_file_holds_what_the_table_says(run: Path, tmp_path: Path) -> None:
    out = export_quantized(run, tmp_path / "out", PAPER)
    model, state = load_quantized(out), load_file(out / "quantized.safetensors")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(layers) == 14
    for name, each in layers.items():
        size = sum(tensor.nbytes for key, tensor in state.items() if key.startswith(f"{name}."))
        assert size == stored_bytes(
            COMPUTES["int8-outlier"], each.out_features, each.in_features, len(each.outlier_columns)
        )
    others = {key for key in state if not any(key.startswith(f"{name}.") for name in layers)}
    assert others == {name for name, _ in model.named_parameters()}


def test_other_software_does_not_take_it_for_a_model_of_random_weights(run: Path, tmp_path: Path) -> None:
    out = export_quantized(run, tmp_path / "out", "int8-row")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out).encode("def")) == "def"


def test_a_mixture_is_written_and_loaded_with_its_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_local_experts": 3,
    }
    made, tokens = (
        MixtralForCausalLM(MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2)),
        held_out_like(),
    )
    made.bfloat16().eval().save_pretrained(tmp_path / "plain")
    model, row = quantized_export._loaded(tmp_path / "plain"), with_codes(PAPER)
    columns = find_outlier_columns(model, [tokens], row)
    assert columns["model.layers.0.mlp.experts.gate_up_proj"]
    quantize_for_inference(model, row, outlier_columns=columns)
    (tmp_path / "out").mkdir()
    quantized_export._write(model, tmp_path / "plain", tmp_path / "out", row, 1 << 30)
    loaded = load_quantized(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert inference_bytes(loaded).after == inference_bytes(model).after


def test_several_files_are_read_as_one(run: Path, tmp_path: Path) -> None:
    out = export_quantized(run, tmp_path / "out", PAPER, max_file_bytes=4000)
    assert len(list(out.glob("quantized-*.safetensors"))) > 2
    one = export_quantized(run, tmp_path / "one", PAPER)
    tokens = held_out(run)[0]
    with torch.no_grad():
        assert torch.equal(load_quantized(out)(tokens).logits, load_quantized(one)(tokens).logits)
    next(out.glob("quantized-*.safetensors")).unlink()
    with pytest.raises(RecordError, match=r"tensors where its config\.json asks for"):
        load_quantized(out)


def test_a_tensor_of_another_compute_is_noticed(run: Path, tmp_path: Path) -> None:
    out = export_quantized(run, tmp_path / "out", "int8-outlier-codes")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "narrowgauge", "compute": "int8-outlier-codes"}
    config["quantization_config"]["compute"] = "int8-outlier"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecordError, match="outlier_columns' is one that differs"):
        load_quantized(out)
    state = load_file(out / "quantized.safetensors")
    save_file({**state, "extra": torch.zeros(1, dtype=torch.float32)}, out / "quantized.safetensors")
    with pytest.raises(RecordError, match="Export it again"):
        load_quantized(out)


def test_the_command_line_exports_and_samples(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("export", str(run), str(out), "--quantize", PAPER)
    assert result.exit_code == 0 and str(out) in result.output
    words = ("a", "--tokens", "5", "--temperature", "0")
    sampled = call("sample", str(out), *words)
    assert sampled.exit_code == 0 and sampled.output.startswith("a")
    assert call("sample", str(out), *words).output == sampled.output
    assert sampled.output.rstrip("\n") == text_sampling.sample(out, "a", 5, 0.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--quantize", "bf16"), "compute 'bfloat16' was requested for inference, and its weights are not 8-bit codes"),
        (("--quantize", "int8-outlier+threshold=0"), "a threshold of outliers is a finite number above 0"),
        (("--quantize", "int9"), "no compute is named 'int9'"),
        (("--quantize", "int8-row", "--dtype", "float32"), "leave --dtype out"),
        (("--quantize", "int8-row", "--nproc", "2"), "leave --nproc out"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    words: tuple[str, ...], message: str, run: Path, tmp_path: Path
) -> None:
    result = call("export", str(run), str(tmp_path / "out"), *words)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_other_folders_are_no_quantized_exports(plain: Path, tmp_path: Path) -> None:
    for folder in (plain, tmp_path):
        with pytest.raises(RecordError, match="holds no model that was exported with --quantize"):
            load_quantized(folder)
    with pytest.raises(RecipeError, match="'nvfp4' was requested for inference"):
        export_quantized(plain, tmp_path / "out", "nvfp4")
    (tmp_path / "config.json").write_text("{")
    assert call("sample", str(tmp_path), "a").exit_code == 2
