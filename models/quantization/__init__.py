"""Quantization-aware training for Keras 3: `quantize_aware`, train, `strip`, convert."""

from models.quantization.layers import FakeQuantize, QuantizedLayer
from models.quantization.rewrite import QuantizationConfig, quantize_aware
from models.quantization.specs import LayerSpec
from models.quantization.strip import in_float, ranges, strip

__all__ = [
    "FakeQuantize",
    "LayerSpec",
    "QuantizationConfig",
    "QuantizedLayer",
    "in_float",
    "quantize_aware",
    "ranges",
    "strip",
]
