"""Narrowgauge in TRL: bfloat16 adapters in 8 bytes a parameter, by one argument of the Trainer.

Run with: python examples/trl_sft.py
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import narrowgauge as ng

# A model and a tokenizer of your own stand here; these need no download.
text = "the quick brown fox jumps over a lazy dog"
words = ["<pad>", "<eos>", *text.split()]
tokenizer = Tokenizer(
    models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>")
)
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=11, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
# PEFT makes adapters float32 unless asked not to.
adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, adapters, autocast_adapter_dtype=False)

args = SFTConfig(
    tempfile.mkdtemp(), max_steps=20, per_device_train_batch_size=4, learning_rate=3e-2, max_length=16,
    dataset_text_field="text", logging_steps=5, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
)  # fmt: skip
trainer = SFTTrainer(
    model,
    args,
    train_dataset=Dataset.from_dict({"text": [text] * 32}),
    processing_class=tokenizer,
    optimizer_cls_and_kwargs=(ng.AdamW, {"lr": args.learning_rate, "storage": "word"}),
)
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
optimizer = trainer.optimizer.optimizer  # inside Accelerate's wrapper
print(
    f"{len(optimizer.state)} adapters have states, {optimizer.bytes_per_param():.1f} bytes per "
    "parameter"
)
