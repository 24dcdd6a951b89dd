"""LoRA adapters in 8 bytes a parameter, over a base of half a byte: PEFT's own model, and one line
for each.

Run with: python examples/peft_adapters.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.integrations.peft import dequantize_base, quantize_base

torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
tokens = torch.randint(0, 256, (4, 33))
adapters = LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
)

for base in ("bfloat16", "int8-outlier-codes", "nvfp4"):
    torch.manual_seed(1)
    model = get_peft_model(LlamaForCausalLM(shape), adapters)
    if base != "bfloat16":
        quantize_base(model, base)
    model, optimizer = ng.prepare(model, "bfloat16/word", lr=1e-2)
    model.train()
    losses = []
    for _ in range(20):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    num_states = len(optimizer.state_dict()["state"])
    num_bytes = model.get_memory_footprint()
    print(
        f"{base:12}  loss {losses[0]:.3f} to {losses[-1]:.3f}  {num_bytes:7,} bytes  {num_states} "
        "states"
    )

merged = dequantize_base(model).merge_and_unload()
print(
    f"merged: {type(merged).__name__}, "
    f"{sum('lora' in name for name, _ in merged.named_parameters())} adapters left"
)
