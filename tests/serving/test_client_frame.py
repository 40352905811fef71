"""Columns to inputs and outputs to columns."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from serving.client import frame as client_frame
from serving.client.base import NO_METADATA
from serving.client.model_info import SignatureInfo, TensorInfo
from serving.errors import ServingError

FRAME = pd.DataFrame(
    {
        "real": [1.5, None, 3.0],
        "whole": [1, 2, 300],
        "gap": pd.array([1, None, 3], dtype="Int64"),
        "flag": [True, False, True],
        "text": ["a", "é", ""],
        "hole": ["a", None, "c"],
        "kind": pd.Categorical(["u", "v", "u"]),
        "pair": [[1, 2], [3, 4], [5, 6]],
        "ragged": [[1], [2, 3], [4]],
        "date": [datetime.datetime(2026, 1, 1)] * 3,
        "nothing": [None, None, None],
    }
)


def signature(**inputs: tuple[str, tuple[int, ...] | None]) -> SignatureInfo:
    infos = {alias: TensorInfo(f"DT_{dtype}", shape) for alias, (dtype, shape) in inputs.items()}
    return SignatureInfo(inputs=infos, outputs={"y": TensorInfo("DT_FLOAT", (-1,))})


def array_of(name: str, dtype: str, shape: tuple[int, ...] | None) -> np.ndarray:
    return client_frame.to_inputs(client_frame.to_table(FRAME), signature(**{name: (dtype, shape)}))[name]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("real", "FLOAT", (-1,), np.array([1.5, np.nan, 3], np.float32)),
        ("real", "DOUBLE", (-1, 1), np.array([[1.5], [np.nan], [3]])),
        ("gap", "FLOAT", None, np.array([1, np.nan, 3], np.float32)),
        ("gap", "HALF", (-1,), np.array([1, np.nan, 3], np.float16)),
        ("nothing", "FLOAT", (-1,), np.full(3, np.nan, np.float32)),
        ("whole", "INT32", (-1,), np.array([1, 2, 300], np.int32)),
        ("whole", "FLOAT", (-1, 1, 1), np.array([[[1]], [[2]], [[300]]], np.float32)),
        ("flag", "BOOL", (-1,), np.array([True, False, True])),
        ("flag", "INT64", (-1,), np.array([1, 0, 1])),
        ("text", "STRING", (-1, 1), np.array([["a"], ["é"], [""]], object)),
        ("kind", "STRING", (-1,), np.array(["u", "v", "u"], object)),
        ("pair", "FLOAT", (-1, 2), np.array([[1, 2], [3, 4], [5, 6]], np.float32)),
        ("pair", "INT64", (-1, 2, 1), np.array([[[1], [2]], [[3], [4]], [[5], [6]]])),
        ("pair", "INT64", (-1, -1), np.array([[1, 2], [3, 4], [5, 6]])),
    ],
    ids=lambda value: "" if isinstance(value, np.ndarray) else str(value),
)
def test_columns(name: str, dtype: str, shape: tuple[int, ...] | None, expected: np.ndarray) -> None:
    array = array_of(name, dtype, shape)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("gap", "INT64", (-1,), "column 'gap': value 1 is missing, and only inputs of floats take NaN for it"),
        ("hole", "STRING", (-1,), "column 'hole': value 1 is missing"),
        ("nothing", "STRING", (-1,), "column 'nothing': value 0 is missing"),
        ("real", "INT32", (-1,), "column 'real': value 1 is missing"),
        ("whole", "INT8", (-1,), "column 'whole': Integer value 300 not in range: -128 to 127"),
        ("whole", "BOOL", (-1,), "column 'whole': it holds int64, but the input takes bool"),
        ("whole", "STRING", (-1,), "column 'whole': it holds int64, but the input takes strings"),
        ("text", "FLOAT", (-1,), "string, but the input takes float32"),
        ("date", "INT64", (-1,), "column 'date': it holds timestamp"),
        ("pair", "FLOAT", (-1, 3), r"column 'pair': a row has the shape \[2\], but the input takes \[3\]"),
        ("ragged", "FLOAT", (-1, -1), r"column 'ragged': its lists have different lengths \(1, 2\)"),
        ("whole", "INT64", (), "column 'whole': the input takes one value for all rows"),
        ("whole", "COMPLEX64", (-1,), "the input has a type that no column has"),
        ("absent", "FLOAT", (-1, 4), "the table lacks columns for the inputs {'absent': .*it has .'real', 'whole'"),
    ],
)
def test_columns_that_do_not_fit(name: str, dtype: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ServingError, match=f"INVALID_ARGUMENT: .*{message}"):
        array_of(name, dtype, shape)


def test_a_single_input_takes_all_columns() -> None:
    table = pa.table({"a": [1, 2], "b": [0.5, None]})
    inputs = client_frame.to_inputs(table, signature(x=("FLOAT", (-1, 2))))
    np.testing.assert_array_equal(inputs["x"], np.array([[1, 0.5], [2, np.nan]], np.float32))
    with pytest.raises(ServingError, match="the table lacks columns"):
        client_frame.to_inputs(table, signature(x=("FLOAT", (-1, 3))))


def test_columns_without_a_signature_keep_their_types() -> None:
    table = pa.table({"a": [1, 2], "s": ["x", "y"], "f": pa.array([0.5, None], pa.float32())})
    inputs = client_frame.to_inputs(table, NO_METADATA)
    assert {name: array.dtype for name, array in inputs.items()} == {"a": np.int64, "s": object, "f": np.float32}
    with pytest.raises(ServingError, match="column 'a': value 0 is missing"):
        client_frame.to_inputs(pa.table({"a": [None, 2]}), NO_METADATA)


def test_outputs_become_columns_with_the_index_of_the_frame() -> None:
    outputs = {
        "y": np.array([[1.0], [2.0]], np.float32),
        "p": np.array([[1, 2], [3, 4]]),
        "text": np.array(["é".encode(), b""], object),
        "raw": np.array([b"\xff", b""], object),
        "deep": np.zeros((2, 1, 2), np.float32),
    }
    table = client_frame.from_outputs(outputs)
    assert table.column_names == ["y", "p_0", "p_1", "text", "raw", "deep"]
    assert table["y"].type == pa.float32()
    assert table["deep"].to_pylist() == [[[0, 0]], [[0, 0]]]
    frame = client_frame.like(pd.DataFrame({"a": [0, 0]}, index=["r", "s"]), table)
    assert frame.index.tolist() == ["r", "s"]
    assert frame.loc["s", ["y", "p_0", "p_1"]].tolist() == [2.0, 3, 4]
    assert frame["text"].tolist() == ["é", ""]
    assert frame["raw"].tolist() == [b"\xff", b""]
    with pytest.raises(ServingError, match="different numbers of rows"):
        client_frame.from_outputs({"a": np.zeros(2), "b": np.zeros(3)})


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        ({"a": [1]}, TypeError, "a frame is a pandas.DataFrame or a pyarrow.Table, but got dict"),
        (pd.DataFrame({"a": [1, "x"]}, dtype=object), ServingError, "the frame has a column that is no table column"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ServingError, "Duplicate column names"),
        (pd.DataFrame({"x": []}), ServingError, "the table has no rows"),
    ],
    ids=["dict", "mixed", "duplicate", "empty"],
)
def test_frames_that_are_none(frame: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        client_frame.to_inputs(client_frame.to_table(frame), signature(x=("FLOAT", (-1,))))
