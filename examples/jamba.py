"""Train Jamba, attention beside state-space layers and experts, in float8-row/word.

Linear layers and experts multiply in float8. The scans of the state-space layers stay in PyTorch.
"""

import torch
from transformers import JambaConfig, JambaForCausalLM

import narrowgauge as ng
from narrowgauge.matmul import NarrowLayers

torch.manual_seed(0)
config = JambaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_period=4,
    attn_layer_offset=2,
    num_experts=4,
    mamba_d_state=8,
    pad_token_id=0,
)
model = JambaForCausalLM(config)
model, optimizer = ng.prepare(model, "float8-row/word", lr=3e-3)
print(NarrowLayers(model))

tokens = torch.arange(33).repeat(8, 1) + torch.arange(8)[:, None]  # sequences that count
for step in range(40):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.3f}")
