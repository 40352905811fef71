"""The built-in sources: each is a function that yields Arrow record batches.

A source takes `path` and its own options as keywords and yields `pyarrow.RecordBatch`es of one schema, tensors as
`pyarrow.fixed_shape_tensor`. Write your own the same way and name it `package.module:function`; it may yield what
`iterables.record_batches` takes, too.
"""

from components.ingest.sources.arrays import numpy_arrays, tensor_array
from components.ingest.sources.files import find_files
from components.ingest.sources.images import image_folder, image_manifest
from components.ingest.sources.iterables import record_batches
from components.ingest.sources.queries import sql
from components.ingest.sources.tables import csv, jsonl, parquet
from components.ingest.sources.texts import text
from components.ingest.sources.tfrecords import tfrecord

__all__ = [
    "csv",
    "find_files",
    "image_folder",
    "image_manifest",
    "jsonl",
    "numpy_arrays",
    "parquet",
    "record_batches",
    "sql",
    "tensor_array",
    "text",
    "tfrecord",
]
