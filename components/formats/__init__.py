"""The forms in which a model leaves: conversion of any Keras model, and how each form is run.

`Network.of(model)` makes of a model what converters can take; `convert_tflite`, `convert_onnx` and those of the optional
packages (OpenVINO, Core ML, TensorRT) write a file that was run and compared with Keras, or raise a `ConversionError` that
names the operation and the way round; `load_runner` runs any of them. `pipeline` holds the forms of a pipeline's own
model, with its preprocessing.
"""

from components.formats.calibration import stratified
from components.formats.coreml import convert_coreml
from components.formats.errors import ConversionError
from components.formats.graph import UnmappedOp
from components.formats.lookups import Split, split_lookups
from components.formats.network import Arrays, Network
from components.formats.onnx import convert_onnx, unmapped_ops
from components.formats.openvino import convert_openvino
from components.formats.picture import draw_layers, draw_onnx
from components.formats.pipeline import (
    FORMATS_FILE,
    Core,
    Format,
    Runner,
    answer_in_batches,
    files_of,
    make_runner,
    output_name,
    read_formats,
    run_file,
    size_bytes,
    transformed_signature,
    write_formats,
    zipped_bytes,
)
from components.formats.results import Conversion, Quantization, TensorInfo
from components.formats.runners import ModelRunner, load_runner
from components.formats.saved_model import EXTRAS, convert_saved_model
from components.formats.tensorrt import convert_tensorrt
from components.formats.tflite import convert_tflite

__all__ = [
    "EXTRAS",
    "FORMATS_FILE",
    "Arrays",
    "Conversion",
    "ConversionError",
    "Core",
    "Format",
    "ModelRunner",
    "Network",
    "Quantization",
    "Runner",
    "Split",
    "TensorInfo",
    "UnmappedOp",
    "answer_in_batches",
    "convert_coreml",
    "convert_onnx",
    "convert_openvino",
    "convert_saved_model",
    "convert_tensorrt",
    "convert_tflite",
    "draw_layers",
    "draw_onnx",
    "files_of",
    "load_runner",
    "make_runner",
    "output_name",
    "read_formats",
    "run_file",
    "size_bytes",
    "split_lookups",
    "stratified",
    "transformed_signature",
    "unmapped_ops",
    "write_formats",
    "zipped_bytes",
]
