"""Narrowgauge in Hugging Face's Trainer: a bfloat16 model, one argument for the optimizer, one
callback for the record.

Run with: python examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import narrowgauge as ng
from narrowgauge.integrations.huggingface import NarrowgaugeCallback

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
strides = (
    torch.randint(0, 3, (64, 33)).cumsum(1) % 64
)  # a walk over the vocabulary in small strides
rows = [{"input_ids": row, "labels": row} for row in strides]
folder = tempfile.mkdtemp()


def trainer_for(steps: int) -> Trainer:
    torch.manual_seed(1)
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_grad_norm=0, save_steps=10, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        optimizer_cls_and_kwargs=(
            ng.AdamW,
            {"lr": args.learning_rate, "storage": "word", "max_grad_norm": 1.0},
        ),
        callbacks=[NarrowgaugeCallback()],
    )


trainer = trainer_for(steps=20)
trainer.train()
print(f"evaluation: {trainer.evaluate()['eval_loss']:.3f}")

again = trainer_for(steps=20)
again.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
weights = trainer.model.state_dict()
resumed = again.model.state_dict()
print(
    "resumed at step 10: the same bits",
    all(torch.equal(weights[name], resumed[name]) for name in weights),
)

run = f"{folder}/narrowgauge"
print(f"a run folder of {len(ng.read_run(run).steps)} steps: narrowgauge report {run}")
