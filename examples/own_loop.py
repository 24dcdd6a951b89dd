"""Narrowgauge in a training loop of your own: two lines change.

Run with: python examples/own_loop.py
"""

import torch

import narrowgauge as ng

torch.manual_seed(0)
inputs = torch.randn(512, 32)
targets = torch.sin(inputs @ torch.randn(32, 8))

model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model, optimizer = ng.prepare(
    model, "bfloat16/word", lr=3e-3, weight_decay=0.0
)  # instead of model.to(bfloat16), AdamW
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

for step in range(200):
    loss = torch.nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 50 == 49:
        reading = ng.audit(optimizer).total
        print(
            f"step {step + 1}  loss {loss.item():.4f}  EDQ {reading.edq:.3f}  lost "
            f"{reading.lost_fraction:.1%}"
        )

print(f"{optimizer.bytes_per_param():.1f} bytes per parameter: weight, gradient and both moments")
