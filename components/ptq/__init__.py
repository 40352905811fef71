"""Post-training quantization (PTQ): a trained model in int8, without its training.

TFLite's own calibration knows minima and maxima alone. Here a quantization-aware copy of the model (`models.quantization`)
gets its ranges from calibration examples, and the converters take exactly these. So every format has the same ranges, and
what an int8 layer costs can be measured before anything is converted.
"""

from components.ptq.histograms import Histogram, range_of
from components.ptq.quantizer import Quantized, quantize
from components.ptq.sensitivity import Sensitivity
from components.ptq.simulation import Simulation

__all__ = ["Histogram", "Quantized", "Sensitivity", "Simulation", "quantize", "range_of"]
