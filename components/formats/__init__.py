"""The forms in which a model leaves: conversion of any Keras model, and how each form is run.

`Network.of(model)` makes of a model what converters can take; `convert_tflite` and `convert_onnx` write a file that was run
and compared with Keras, or raise a `ConversionError` that names the operation and the way round; `load_runner` runs any of
them. `pipeline` holds the forms of a pipeline's own model, with its preprocessing.
"""

from components.formats.calibration import stratified
from components.formats.errors import ConversionError
from components.formats.graph import UnmappedOp
from components.formats.lookups import Split, split_lookups
from components.formats.network import Arrays, Network
from components.formats.onnx import convert_onnx, unmapped_ops
from components.formats.picture import draw_layers, draw_onnx
from components.formats.pipeline import (
    FORMATS_FILE,
    Core,
    Format,
    Runner,
    answer_in_batches,
    make_runner,
    output_name,
    read_formats,
    run_file,
    size_bytes,
    to_onnx,
    to_tflite,
    transformed_signature,
    write_formats,
)
from components.formats.results import Conversion, Quantization, TensorInfo
from components.formats.runners import ModelRunner, load_runner
from components.formats.tflite import convert_tflite

__all__ = [
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
    "convert_onnx",
    "convert_tflite",
    "draw_layers",
    "draw_onnx",
    "load_runner",
    "make_runner",
    "output_name",
    "read_formats",
    "run_file",
    "size_bytes",
    "split_lookups",
    "stratified",
    "to_onnx",
    "to_tflite",
    "transformed_signature",
    "unmapped_ops",
    "write_formats",
]
