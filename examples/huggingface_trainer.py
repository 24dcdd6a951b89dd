"""Narrowgauge in Hugging Face's Trainer: one class, one word.

Run with: python examples/huggingface_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import narrowgauge as ng
from narrowgauge.integrations.huggingface import NarrowgaugeTrainer


class MyTrainer(NarrowgaugeTrainer, Trainer):  # instead of Trainer
    pass


torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
strides = torch.randint(0, 3, (64, 33)).cumsum(1) % 64  # a walk over the vocabulary in small strides
rows = [{"input_ids": row, "labels": row} for row in strides]
folder = tempfile.mkdtemp()


def trainer_for(steps: int) -> MyTrainer:
    torch.manual_seed(1)
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        lr_scheduler_type="constant", bf16=True, save_steps=10, logging_steps=10, report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    return MyTrainer(LlamaForCausalLM(config), args, train_dataset=rows, eval_dataset=rows[:8], recipe="bfloat16/word")


trainer = trainer_for(steps=20)
trainer.train()
print(f"evaluation: {trainer.evaluate()['eval_loss']:.3f}")

again = trainer_for(steps=20)
again.train(resume_from_checkpoint=f"{folder}/checkpoint-10")
weights, found = trainer.model.state_dict(), again.model.state_dict()
print("resumed at step 10: the same bits", all(torch.equal(weights[name], found[name]) for name in weights))

trainer.save_model(f"{folder}/saved")
print("saved in", LlamaForCausalLM.from_pretrained(f"{folder}/saved").dtype)
print(
    f"a run folder of {len(ng.read_run(f'{folder}/narrowgauge').steps)} steps: narrowgauge report {folder}/narrowgauge"
)
