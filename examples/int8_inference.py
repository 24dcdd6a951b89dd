"""LLM.int8() inference: a model's weights in a byte each, and why its outlier features stay in 16
bits.

Trained language models have a few features that are far larger than the others, in every token.
This random one is given six, by the gains of its norms. One scale for each token must then reach to
the outliers, and leaves all other features a handful of codes; where the outliers multiply in 16
bits, it need not.

Run with: python examples/int8_inference.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng


def small_llama():
    """A random Llama of 1.9 million parameters, in bfloat16, with outlier features."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=6, initializer_range=0.05)
    ).eval()
    ng.cast_parameters(model, torch.bfloat16)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[:6] *= 60
    return model


@torch.no_grad()
def main():
    model = small_llama()
    prompt = torch.arange(1, 33)[None]
    exact = model(prompt).logits.float()

    before = model.get_memory_footprint()
    for compute in ("int8-row", "int8-outlier-codes"):
        narrow = ng.quantize_for_inference(copy.deepcopy(model), compute)
        off = (narrow(prompt).logits.float() - exact).norm() / exact.norm()
        after = narrow.get_memory_footprint()
        print(
            f"{compute:18}  {before / 1e6:.2f} MB became {after / 1e6:.2f} MB; logits are off by "
            f"{off:.1%}"
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(narrow.state_dict(), path)
        loaded = ng.quantize_for_inference(
            ng.cast_parameters(LlamaForCausalLM(model.config), torch.bfloat16)
        )
        loaded.load_state_dict(load_file(path))
        same = torch.equal(loaded(prompt).logits, narrow(prompt).logits)
        print(
            f"saved in {path.stat().st_size / 1e6:.2f} MB and loaded: "
            f"{'the same bits' if same else 'other bits'}"
        )

    text = narrow.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"it goes on with {text[0, 32:].tolist()}")


if __name__ == "__main__":
    main()
