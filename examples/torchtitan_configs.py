"""torchtitan's configs with our optimizer and layers; torchtitan trains as it does.

torchtitan 0.3 is configured by functions. Put this file where Python finds it, and start any of
them:

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_configs --config llama3_8b_float8 \\
        --hf-assets-path ./assets/hf/Llama-3.1-8B --training.disable-cuda-graphs

torchtitan 0.3 trains with PyTorch 2.14 or newer, and imports Triton.
"""

import math

from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer

from narrowgauge.integrations.torchtitan import NarrowgaugeConverter, narrowgauge_adamw


def in_word(config: Trainer.Config, lr: float) -> Trainer.Config:
    """8 bytes for each parameter where torchtitan's own AdamW has 16; the optimizer clips in
    float32.
    """
    config.training.dtype = "bfloat16"
    config.optimizer = narrowgauge_adamw(lr, storage="word", max_grad_norm=config.training.max_norm)
    config.training.max_norm = math.inf
    return config


def debugmodel_word() -> Trainer.Config:
    return in_word(llama3_debugmodel(), 8e-4)


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3 8B with float8 matmuls scaled by row."""
    config = in_word(llama3_8b(), 3e-4)
    config.model_spec = model_registry(
        "8B", converters=[NarrowgaugeConverter.Config(compute="float8-row")]
    )
    return config
