"""Served models in transformers' folders: ``save_pretrained`` writes the codes that
:func:`narrowgauge.quantize_for_inference` made, and ``from_pretrained`` gives the same model again.

Transformers finds no quantizer by itself: importing this module registers it.
"""

from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from narrowgauge.matmul.inference import METHOD, quantize_for_inference


@register_quantization_config(METHOD)
class ServedConfig(QuantizationConfigMixin):
    """Hold the arguments of ``quantize_for_inference``, for ``config.json`` and ``from_pretrained``.

    Example:
        >>> config = ServedConfig("int8-row")
        >>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)  # doctest: +SKIP
    """

    def __init__(self, compute: str, keep: tuple[str, ...] = (), **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.compute = compute
        self.keep = list(keep)


@register_quantizer(METHOD)
class ServedQuantizer(HfQuantizer):
    """Quantize a model before its codes are loaded, or after its weights are."""

    quantization_config: Any
    is_trainable = False
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pre_quantized:
            self._quantize(model)
            for module in model.modules():
                if hasattr(module, "stored_weights"):  # else it would get random weights
                    module._is_hf_initialized = True
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        return model if self.pre_quantized else self._quantize(model)

    def _quantize(self, model: Any) -> Any:
        config = self.quantization_config
        return quantize_for_inference(model, config.compute, tuple(config.keep))
