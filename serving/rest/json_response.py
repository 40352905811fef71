"""Arrays to the body of a REST predict, classify or regress answer, in TF Serving's layout and number format.

Source: tensorflow_serving/util/json_tensor.cc, which writes with RapidJSON's PrettyWriter: four spaces, innermost lists
on one line in the row format (and the odd line break before the closing bracket), one value a line in the other.
NaN and Infinity are written bare, as there.
"""

from __future__ import annotations

import base64
import json
import math
import re
from array import array as c_array
from collections.abc import Iterator, Mapping

import numpy as np

from serving import dtypes
from serving.errors import invalid_argument
from serving.tensors import to_bytes

_INTEGERS = frozenset(
    (dtypes.INT8, dtypes.INT16, dtypes.INT32, dtypes.INT64, dtypes.UINT8, dtypes.UINT32, dtypes.UINT64)
)
# absl::StrCat writes six significant digits; when those do not read back exactly, max_digits10 are written.
_MAX_DIGITS10 = {dtypes.FLOAT: 9, dtypes.DOUBLE: 17}
# Turned to text at a time: a value takes ten times as much memory as a Python object, and other threads have to wait as
# long as a call into C takes.
_BLOCK_VALUES = 8_192


def predictions(outputs: Mapping[str, np.ndarray], key: str = "predictions") -> bytes:
    """The answer to a request in row format.

    Args:
        outputs: output alias -> array of shape (batch, ...).
        key: the key of the rows.

    Raises:
        ServingError: INVALID_ARGUMENT when an output has no batch dimension, the batches differ, or a type has no
            JSON form.
    """
    batch_size = _batch_size(outputs)
    if len(outputs) == 1:
        [(alias, array)] = outputs.items()
        rows = _rows(alias, array, level=2)
        body = ", ".join(rows) + "\n    " if rows else ""
        return _text(f'{{\n    "{key}": [{body}]\n}}')
    texts = {alias: _rows(alias, array, level=3) for alias, array in outputs.items()}
    items = [
        "{\n"
        + ",\n".join(f"            {_quote(alias)}: {rows[item]}" for alias, rows in texts.items())
        + "\n        }"
        for item in range(batch_size)
    ]
    return _text(f'{{\n    "{key}": {_lines(items, 1)}\n}}')


def columns(outputs: Mapping[str, np.ndarray]) -> bytes:
    """The answer to a request in columnar format.

    Raises:
        ServingError: INVALID_ARGUMENT for no outputs, or a type without a JSON form.
    """
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    if len(outputs) == 1:
        [(alias, array)] = outputs.items()
        return _text(f'{{\n    "outputs": {_column(alias, array, level=1)}\n}}')
    members = [f"        {_quote(alias)}: {_column(alias, array, level=2)}" for alias, array in outputs.items()]
    return _text('{\n    "outputs": {\n' + ",\n".join(members) + "\n    }\n}")


def classifications(labels: np.ndarray, scores: np.ndarray) -> bytes:
    """The answer to a classify request.

    Args:
        labels: bytes of shape (batch, num_classes).
        scores: float32 of the same shape.
    """
    texts = [f"[{label}, {score}]" for label, score in zip(_tokens("", labels, 3), _tokens("", scores, 3), strict=True)]
    rows = ["[" + ", ".join(group) + "]" for group in _groups(texts, labels.shape, 1)]
    return _text(f'{{\n    "results": [{", ".join(rows)}\n    ]\n}}')


def regressions(values: np.ndarray) -> bytes:
    """The answer to a regress request.

    Args:
        values: float32 of shape (batch,).
    """
    return _text(f'{{\n    "results": [{", ".join(_tokens("", values, 1))}]\n}}')


def strict(body: bytes) -> bytes:
    """The same answer as JSON of RFC 8259, which has no NaN and no Infinity: they become null."""
    if b"NaN" not in body and b"Infinity" not in body:
        return body
    return _STRING_OR_SPECIAL.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", body)


def error_body(message: str) -> bytes:
    """The body of an error answer."""
    return _text(f'{{\n    "error": {_quote(message)}\n}}')


def _batch_size(outputs: Mapping[str, np.ndarray]) -> int:
    if not outputs:
        raise invalid_argument("Cannot convert empty tensor map to JSON")
    batch_size = -1
    for alias, array in outputs.items():
        if array.ndim == 0:
            raise invalid_argument(f"Tensor name: {alias} has no shape information ")
        if batch_size not in (-1, array.shape[0]):
            raise invalid_argument(
                f"Tensor name: {alias} has inconsistent batch size: {array.shape[0]} expecting: {batch_size}"
            )
        batch_size = array.shape[0]
    return batch_size


def _rows(alias: str, array: np.ndarray, level: int) -> list[str]:
    """The text of each row, all its lists on one line; `level` counts the brackets open around a row."""
    if array.size > _BLOCK_VALUES:
        num_rows = _BLOCK_VALUES * len(array) // array.size
        if num_rows > 0:
            starts = range(0, len(array), num_rows)
            return [row for start in starts for row in _rows(alias, array[start : start + num_rows], level)]
        return ["[" + ", ".join(_pieces(alias, row, level + 1)) + "]" for row in array]
    texts = _tokens(alias, array, level + array.ndim - 1)
    for axis in range(array.ndim - 1, 0, -1):
        texts = ["[" + ", ".join(group) + "]" for group in _groups(texts, array.shape, axis)]
    return texts


def _pieces(alias: str, array: np.ndarray, level: int) -> Iterator[str]:
    """The rows' texts, as many in a piece as fit into a block."""
    num_rows = max(1, _BLOCK_VALUES * len(array) // array.size)
    for start in range(0, len(array), num_rows):
        yield ", ".join(_rows(alias, array[start : start + num_rows], level))


def _column(alias: str, array: np.ndarray, level: int) -> str:
    """The text of a whole array, one value a line; `level` counts the brackets open around it."""
    return _lines(_items(alias, array, level + 1), level) if array.ndim else _tokens(alias, array, level)[0]


def _items(alias: str, array: np.ndarray, level: int) -> list[str]:
    """The texts of the parts of an array, of a large one as many joined as fit into a block."""
    if array.size > _BLOCK_VALUES:
        num_parts = _BLOCK_VALUES * len(array) // array.size
        if num_parts == 0:
            return [_column(alias, part, level) for part in array]
        separator = ",\n" + "    " * level
        blocks = (array[start : start + num_parts] for start in range(0, len(array), num_parts))
        return [separator.join(_items(alias, block, level)) for block in blocks]
    texts = _tokens(alias, array, level + array.ndim - 1)
    for axis in range(array.ndim - 1, 0, -1):
        texts = [_lines(group, level + axis - 1) for group in _groups(texts, array.shape, axis)]
    return texts


def _groups(texts: list[str], shape: tuple[int, ...], axis: int) -> list[list[str]]:
    size = shape[axis]
    return [texts[index * size : (index + 1) * size] for index in range(math.prod(shape[:axis]))]


def _lines(items: list[str], level: int) -> str:
    """A list with an item a line, inside `level` open brackets."""
    if not items:
        return "[]"
    indent = "\n" + "    " * (level + 1)
    text = ("," + indent).join(items)
    return f"[{indent}{text}\n{'    ' * level}]"  # each + would copy it once more


def _tokens(alias: str, array: np.ndarray, level: int) -> list[str]:
    """The JSON text of each element, in order."""
    number = dtypes.number_of(array)
    flat = array.ravel()
    if number in _MAX_DIGITS10:
        return _decimals(flat, _MAX_DIGITS10[number])
    if number in _INTEGERS:
        return list(map(str, flat.tolist()))
    if number == dtypes.BOOL:
        return ["true" if value else "false" for value in flat.tolist()]
    if number == dtypes.STRING and alias.endswith("_bytes"):
        return [_base64_object(to_bytes(value), level) for value in flat]
    if number == dtypes.STRING:
        return [_quote(to_bytes(value).decode("utf-8", "surrogateescape")) for value in flat]
    raise invalid_argument(f"Failed to write JSON value for tensor type: {dtypes.name(number)}")


_STRING_OR_SPECIAL = re.compile(rb'"(?:[^"\\]|\\.)*"|NaN|-?Infinity')
_SPECIAL = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _decimals(flat: np.ndarray, digits: int) -> list[str]:
    values = flat.tolist()
    texts = list(map("%.6g".__mod__, values))
    read_back = c_array(flat.dtype.char, map(float, texts))  # numpy takes longer over few numbers
    for index, (value, back) in enumerate(zip(values, read_back, strict=True)):
        if value != back:
            texts[index] = f"{value:.{digits}g}"
    return [text if "." in text or "e" in text else _SPECIAL.get(text, text + ".0") for text in texts]


def _base64_object(value: bytes, level: int) -> str:
    text = base64.b64encode(value).decode("ascii")
    return "{\n" + "    " * (level + 1) + f'"b64": "{text}"\n' + "    " * level + "}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
