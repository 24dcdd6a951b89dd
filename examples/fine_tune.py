"""Fine-tune a Hugging Face model in bfloat16, once with torch.optim.AdamW and once with ng.AdamW,
and print both losses.

Run with: python examples/fine_tune.py HuggingFaceTB/SmolLM2-135M text.txt [STEPS]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import narrowgauge as ng

folder, file, *rest = sys.argv[1:]
steps = int(rest[0]) if rest else 100
length = 128
batch = 2
tokenizer = AutoTokenizer.from_pretrained(folder)
with open(file, encoding="utf-8") as text:
    tokens = tokenizer(text.read(), return_tensors="pt").input_ids[0]
rows = tokens[: len(tokens) // length * length].view(-1, length)
held_out = rows[:8]
rows = rows[8:]
assert len(rows) >= batch, (
    f"{file} has {len(tokens):,} tokens. Give {(8 + batch) * length:,} or more."
)


@torch.no_grad()
def validation_loss(model: torch.nn.Module) -> float:
    return model(input_ids=held_out, labels=held_out).loss.item()


for make in (torch.optim.AdamW, ng.AdamW):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    optimizer = make(model.named_parameters(), lr=2e-5, weight_decay=0.0)
    before = validation_loss(model)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        tokens = rows[torch.randint(len(rows), (batch,), generator=draw)]
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{make.__module__.split('.')[0]}: {before:.4f} to {validation_loss(model):.4f}")
