"""Served models are saved and loaded by transformers' own two calls."""

import pytest
import torch

pytest.importorskip("transformers")
from matmul import zoo
from narrowgauge.integrations.huggingface import quantizer
from narrowgauge.matmul.inference import quantize_for_inference

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("Llama", "float8-row"),
        ("Mixtral", "int8-row"),
        ("GptOss", "int8-row"),
        ("T5", "float8-row"),
    ],
)
def test_a_served_model_is_saved_and_loaded(name, compute, tmp_path):
    """Also one that is quantized while it is loaded. Transformers renames Mixtral's modules."""
    plain = zoo.build(name).bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    kind = type(plain)
    served = kind.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    quantize_for_inference(served, compute, keep=("*.0.*k_proj",) if name == "Llama" else ())
    served.save_pretrained(tmp_path / "served")
    # What transformers says of a method that is not registered ends in its name.
    assert "import narrowgauge.integrations.huggingface" in (
        (tmp_path / "served" / "config.json").read_text()
    )
    loaded, notes = kind.from_pretrained(
        tmp_path / "served", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(notes.values())
    inputs = zoo.inputs_of(name)
    with torch.no_grad():
        expected = served(**inputs).logits
        assert torch.equal(loaded(**inputs).logits, expected)
        if name != "Llama":
            config = quantizer.ServedConfig(compute)
            once = kind.from_pretrained(
                tmp_path / "plain", dtype=torch.bfloat16, quantization_config=config
            )
            assert torch.equal(once(**inputs).logits, expected)
