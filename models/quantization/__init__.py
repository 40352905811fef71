"""Quantization-aware training for Keras 3: `quantize_aware`, train, `strip`, convert."""

from models.quantization.layers import FakeQuantize, QuantizedLayer
from models.quantization.rewrite import QuantizationConfig, quantize_aware
from models.quantization.specs import LayerSpec
from models.quantization.strip import ranges, strip

__all__ = ["FakeQuantize", "LayerSpec", "QuantizationConfig", "QuantizedLayer", "quantize_aware", "ranges", "strip"]
