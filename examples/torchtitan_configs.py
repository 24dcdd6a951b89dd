"""torchtitan's configs in recipes: torchtitan trains as it does, and each recipe is one word.

torchtitan 0.3 is configured by functions. Put this file where Python finds it, and start any of them:

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_configs --config llama3_8b_float8 \\
        --hf-assets-path ./assets/hf/Llama-3.1-8B --training.disable-cuda-graphs

torchtitan 0.3 trains with PyTorch 2.14 or newer, and imports Triton.
"""

from narrowgauge.errors import NarrowgaugeError

try:
    from narrowgauge.integrations.torchtitan import with_recipe
except NarrowgaugeError as missing:
    raise SystemExit(str(missing)) from None
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.trainer import Trainer


def debugmodel_word() -> Trainer.Config:
    """The debug model, with 8 bytes for each parameter where torchtitan's own has 16."""
    return with_recipe(llama3_debugmodel(), "bfloat16/word")


def llama3_8b_float8() -> Trainer.Config:
    """Llama 3 8B, with float8 matmuls scaled by row, and updates audited every 50 steps."""
    return with_recipe(llama3_8b(), "float8-row/word", audit_every=50)
