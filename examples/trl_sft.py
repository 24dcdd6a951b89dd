"""Narrowgauge in TRL: bfloat16 adapters in 8 bytes a parameter, by one line before ``train()``.

Run with: python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from trl import SFTConfig, SFTTrainer

from narrowgauge.integrations.huggingface import NarrowgaugeCallback, use_adamw
from narrowgauge.trainer.tokens import load_tokenizer

# A model and a tokenizer of your own stand here; these need no download.
tokenizer = load_tokenizer(None)
tokenizer.pad_token = tokenizer.eos_token
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
# PEFT makes adapters float32 unless asked not to.
adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, adapters, autocast_adapter_dtype=False)

args = SFTConfig(
    tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=4, learning_rate=3e-2, max_length=16,
    dataset_text_field="text", logging_steps=5, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
)  # fmt: skip
texts = Dataset.from_dict({"text": ["the quick brown fox jumps over a lazy dog"] * 32})
trainer = SFTTrainer(
    model, args, train_dataset=texts, processing_class=tokenizer, callbacks=[NarrowgaugeCallback()]
)
use_adamw(trainer, storage="word")
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
optimizer = trainer.optimizer.optimizer  # inside Accelerate's wrapper
size = optimizer.bytes_per_param()
print(f"{len(optimizer.state)} adapters have states, {size:.1f} bytes per parameter")
