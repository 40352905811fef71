"""Tables to the inputs of a signature, and its outputs to a table: pandas through pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serving import dtypes
from serving.client.model_info import SignatureInfo, TensorInfo
from serving.errors import ServingError, invalid_argument
from serving.tensors import object_array


def to_table(frame: Any) -> pa.Table:
    """The Arrow table of a pandas.DataFrame, without its index; an Arrow table as it is.

    Raises:
        ServingError: INVALID_ARGUMENT for a column that is none of Arrow's types.
        TypeError: it is neither.
    """
    if isinstance(frame, pa.Table):
        return frame
    if not type(frame).__module__.startswith("pandas"):
        raise TypeError(f"a frame is a pandas.DataFrame or a pyarrow.Table, but got {type(frame).__name__}")
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ValueError) as error:
        raise invalid_argument(
            f"the frame has a column that is no table column: {'; '.join(map(str, error.args))}"
        ) from error


def like(frame: Any, table: pa.Table) -> Any:
    """A table as the type of a frame, with its index."""
    return table if isinstance(frame, pa.Table) else table.to_pandas().set_axis(frame.index)


def to_inputs(table: pa.Table, signature: SignatureInfo) -> dict[str, np.ndarray]:
    """The arrays of a signature's inputs from the columns of their names.

    Args:
        table: with a column for each input, or with n columns for the only input, of shape (rows, n).
        signature: without inputs (NO_METADATA), every column is one, of its own type.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the column that is missing or does not fit.
    """
    if not table.num_rows:
        raise invalid_argument("the table has no rows")
    if not signature.inputs:
        return {name: _to_array(name, table[name], None) for name in table.column_names}
    missing = sorted(signature.inputs.keys() - set(table.column_names))
    if missing and len(signature.inputs) == 1:
        [info] = signature.inputs.values()
        if info.shape is not None and len(info.shape) == 2 and info.shape[1] in (-1, table.num_columns):
            single = TensorInfo(info.dtype, info.shape[:1])
            columns = [_to_array(name, table[name], single) for name in table.column_names]
            return {missing[0]: np.stack(columns, axis=1)}
    if missing:
        shapes = {alias: signature.inputs[alias].shape for alias in missing}
        raise invalid_argument(f"the table lacks columns for the inputs {shapes}; it has {table.column_names}")
    return {alias: _to_array(alias, table[alias], info) for alias, info in signature.inputs.items()}


def from_outputs(outputs: Mapping[str, np.ndarray]) -> pa.Table:
    """A column for each output; see Client.predict_frame.

    Raises:
        ServingError: INVALID_ARGUMENT when outputs differ in their number of rows.
    """
    columns: dict[str, pa.Array] = {}
    for alias, array in outputs.items():
        if array.ndim == 2 and array.shape[1] != 1:
            columns |= {f"{alias}_{index}": _to_column(array[:, index]) for index in range(array.shape[1])}
        else:
            columns[alias] = _to_column(array[:, 0] if array.ndim == 2 else array)
    if len(set(map(len, columns.values()))) > 1:
        raise invalid_argument(
            f"the outputs have different numbers of rows: { {k: len(v) for k, v in columns.items()} }"
        )
    return pa.table(columns)


def _to_array(name: str, column: pa.ChunkedArray, info: TensorInfo | None) -> np.ndarray:
    try:
        values, row_shape = _flatten(column.combine_chunks())
        flat = _typed(values, info.number if info else None)
        return _reshape(flat, (len(column), *row_shape), info)
    except (ServingError, pa.ArrowException) as error:
        message = error.message if isinstance(error, ServingError) else str(error)
        raise invalid_argument(f"column {name!r}: {message}") from error


def _flatten(array: pa.Array) -> tuple[pa.Array, tuple[int, ...]]:
    """The values of nested lists of equal lengths, and the lengths."""
    shape = []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        _refuse_missing(array)
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(lengths) > 1:
            raise invalid_argument(
                f"its lists have different lengths ({lengths[0]}, {lengths[1]}); all rows need the same"
            )
        shape.extend(lengths)
        array = array.flatten()
    return array, tuple(shape)


def _typed(values: pa.Array, number: int | None) -> np.ndarray:
    """Flat values in a type of TensorFlow, or in their own."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _typed(values.dictionary_decode(), number)
    is_string = any(
        check(kind)
        for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
    wanted = (
        dtypes.NUMPY.get(number) if number is not None else np.dtype(object if is_string else kind.to_pandas_dtype())
    )
    if wanted is None or wanted.kind == "c":
        raise invalid_argument("the input has a type that no column has; use predict with arrays")
    if is_string != (wanted.kind == "O") and not pa.types.is_null(kind):
        raise invalid_argument(f"it holds {kind}, but the input takes {'strings' if wanted.kind == 'O' else wanted}")
    if wanted.kind != "f":
        _refuse_missing(values)
    if is_string:
        return object_array(values.to_pylist())
    if not (_is_number(kind) and wanted.kind != "b") and not pa.types.is_boolean(kind) and not pa.types.is_null(kind):
        raise invalid_argument(f"it holds {kind}, but the input takes {wanted}")
    cast = values.cast(pa.from_numpy_dtype(wanted), safe=wanted.kind != "f")
    return cast.to_numpy(zero_copy_only=False)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _refuse_missing(values: pa.Array) -> None:
    if values.null_count:
        index = pc.index(values.is_null(), True).as_py()
        raise invalid_argument(
            f"value {index} is missing, and only inputs of floats take NaN for it; fill it in, or drop the row"
        )


def _reshape(flat: np.ndarray, shape: tuple[int, ...], info: TensorInfo | None) -> np.ndarray:
    """Rows in the shape that the input has: (rows,) becomes (rows, 1), and lists may be flat."""
    if info is None or info.shape is None:
        return flat.reshape(shape)
    if not info.shape:
        raise invalid_argument("the input takes one value for all rows; use predict with arrays")
    inner = info.shape[1:]
    size = int(np.prod(shape[1:], dtype=np.int64))
    fits = len(inner) == len(shape) - 1 and all(a in (-1, b) for a, b in zip(inner, shape[1:], strict=True))
    if fits:
        return flat.reshape(shape)
    if inner.count(-1) <= 1 and size == abs(int(np.prod(inner, dtype=np.int64))):
        return flat.reshape(shape[0], *inner)
    raise invalid_argument(f"a row has the shape {list(shape[1:])}, but the input takes {list(inner)}")


def _to_column(array: np.ndarray) -> pa.Array:
    """One value a row, or nested lists of fixed sizes."""
    flat: pa.Array = _strings(array.ravel()) if array.dtype.kind == "O" else pa.array(array.ravel())
    for size in reversed(array.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _strings(values: np.ndarray) -> pa.Array:
    """Text where all values are UTF-8, else binary."""
    try:
        return pa.array([value.decode() for value in values], pa.string())
    except UnicodeDecodeError:
        return pa.array(values.tolist(), pa.binary())
