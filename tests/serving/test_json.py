"""JSON in and out: TF Serving's rules, by their numbers in the contract."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from serving import dtypes
from serving.errors import Code, ServingError
from serving.rest import json_request, json_response, json_tensor, json_text

FLOAT = {"x": dtypes.FLOAT}


def parse(body: str, types: dict[str, int]) -> dict[str, np.ndarray]:
    return json_request.parse_inputs(json_request.parse_object(body.encode()), types)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1} trailing', {"a": 1}),
        ("\ufeff[1]", [1]),
        ("[NaN]", [float("nan")]),
        ("[Inf, -Inf, Infinity, -Infinity]", [float("inf"), float("-inf"), float("inf"), float("-inf")]),
        ('[[], {}, [{}, []], {"a": {"b": []}}, NaN]', [[], {}, [{}, []], {"a": {"b": []}}, float("nan")]),
        ('{"a": 1, "a": Inf}', {"a": float("inf")}),
        ('["\\u00e9\\n\\ud83d\\ude00", Inf]', ["é\n😀", float("inf")]),
        ("[-0, 1.5e3, 18446744073709551615, 18446744073709551616, Inf]", [0, 1500.0, 2**64 - 1, 2.0**64, float("inf")]),
    ],
)
def test_beyond_the_standard(text: str, value: Any) -> None:
    np.testing.assert_equal(json_text.loads(text.encode()), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The document is empty"),
        ("  \n", "The document is empty. at offset: 3"),
        ("[1, x]", "Invalid value. at offset: 4"),
        ("[1 2]", "Missing a comma or ] after an array element. at offset: 3"),
        ("[1, 2", "Missing a comma or ] after an array element. at offset: 5"),
        ('{"a" 1}', "Missing a colon after a name of object member. at offset: 5"),
        ('{"a": 1 "b"}', "Missing a comma or } after an object member. at offset: 8"),
        ("{1: 2}", "Missing a name for object member. at offset: 1"),
        ('["abc', "Missing a closing quotation mark in string. at offset: 1"),
        pytest.param(
            '["' + "h" * 100_000 + "\x01", "Missing a closing quotation mark in string. at offset: 1", id="long"
        ),
        ('["\\x"]', "Invalid escape character in string."),
        ('["\\ud800"]', "Invalid escape character in string."),
        ("[1.]", "Miss fraction part in number."),
        ("[1e]", "Miss exponent part in number."),
        ("[1e400]", "Number too big to be stored in double."),
        pytest.param(f"[1{'0' * 400}]", "Number too big to be stored in double. at offset: 1", id="wide integer"),
    ],
)
def test_syntax_errors(text: str, message: str) -> None:
    with pytest.raises(ServingError) as raised:
        json_text.loads(text.encode())
    assert raised.value.message.startswith("JSON Parse error: " + message.split(" at offset")[0])
    assert "at offset" not in message or raised.value.message.endswith(message)


def test_wide_integers_are_doubles_beside_nan_too() -> None:
    values = json_text.loads(b"[NaN, 18446744073709551615, 18446744073709551616]")[1:]
    assert [(type(value), value) for value in values] == [(int, 2**64 - 1), (float, 2.0**64)]


def test_depth_is_bounded_by_memory_only() -> None:
    value = json_text.loads(b"[" * 200_000 + b"]" * 200_000)
    depth = 0
    while value:
        value, depth = value[0], depth + 1
    assert depth == 199_999
    with pytest.raises(ServingError, match="nested 200000 deep; a tensor has at most 63 dimensions"):
        parse('{"inputs": ' + "[" * 200_000 + "]" * 200_000 + "}", FLOAT)


def test_invalid_utf8_passes_through() -> None:
    document = json_request.parse_object(b'{"instances": ["\xff\xfe"]}')
    inputs, _ = json_request.parse_inputs(document, {"s": dtypes.STRING})
    assert inputs["s"].tolist() == [b"\xff\xfe"]
    assert b'"\xff\xfe"' in json_response.predictions({"s": inputs["s"]})


@pytest.mark.parametrize(
    ("body", "types", "message"),
    [
        ("[1]", FLOAT, "JSON Value: [\n    1\n] Is not object"),
        ("{}", FLOAT, "Missing 'inputs' or 'instances' key"),
        ('{"instances": [1], "inputs": [1]}', FLOAT, "expecting only one of 'inputs' or 'instances' keys to exist"),
        ('{"instances": [null]}', FLOAT, "Type: Null is not of expected type: float"),
        (
            '{"instances": [1.0, true]}',
            FLOAT,
            "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT",
        ),
        ('{"instances": [1.0]}', {"x": dtypes.INT32}, "Type: Number is not of expected type: int32"),
        ('{"instances": [2147483648]}', {"x": dtypes.UINT8}, "is not of expected type: uint8"),
        ('{"instances": [-1]}', {"x": dtypes.UINT32}, "is not of expected type: uint32"),
        ('{"instances": [1]}', {"x": dtypes.BOOL}, "is not of expected type: bool"),
        ('{"instances": [1]}', {"x": dtypes.STRING}, "is not of expected type: string"),
        ('{"instances": [{"b64": "aGVsbG8="}]}', FLOAT, "Type: Object is not of expected type: float"),
        ('{"instances": [{"b64": "a?b"}]}', {"x": dtypes.STRING}, "Unable to base64 decode"),
        ('{"inputs": [{"b64": 1}]}', {"x": dtypes.STRING}, "not formatted correctly for base64 data"),
        ('{"instances": [{"x": 1, "y": 2}]}', FLOAT, "JSON object: does not have named input: y"),
        ('{"instances": [{"x": 1}]}', {**FLOAT, "y": dtypes.FLOAT}, "keys must be equal to: x,y"),
        (
            '{"instances": [1]}',
            {**FLOAT, "y": dtypes.FLOAT},
            "instances is a plain list, but expecting list of objects",
        ),
        ('{"inputs": [1]}', {**FLOAT, "y": dtypes.FLOAT}, "inputs is a plain value/list, but expecting an object"),
        ('{"inputs": {"x": 1}}', {**FLOAT, "y": dtypes.FLOAT}, "Missing named input: y in 'inputs' object."),
        ('{"inputs": [[1, 2], [3]]}', FLOAT, "Encountered list at unexpected size: 1 at level: 1 expected size: 2"),
        ('{"inputs": [[1], 3]}', FLOAT, "found at incorrect level: 2 in the JSON DOM. Expected at level: 2"),
        ('{"inputs": [1, [3]]}', FLOAT, "Encountered list at unexpected level: 1 expected < 1"),
    ],
)
def test_request_errors(body: str, types: dict[str, int], message: str) -> None:
    with pytest.raises(ServingError) as raised:
        parse(body, types)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message


def test_unsupported_type_is_unimplemented_in_columns_only() -> None:
    with pytest.raises(ServingError) as columns:
        parse('{"inputs": [1]}', {"x": dtypes.HALF})
    with pytest.raises(ServingError) as rows:
        parse('{"instances": [1]}', {"x": dtypes.HALF})
    assert (columns.value.code, rows.value.code) == (Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT)
    assert "to type: half" in columns.value.message


@pytest.mark.parametrize(
    ("body", "number", "expected"),
    [
        ('{"instances": [300, -1]}', dtypes.UINT8, np.array([44, 255], np.uint8)),  # no range check
        ('{"inputs": 7}', dtypes.INT64, np.array(7, np.int64)),
        ('{"inputs": [18446744073709551615]}', dtypes.UINT64, np.array([2**64 - 1], np.uint64)),
        ('{"inputs": [[], []]}', dtypes.FLOAT, np.empty((2, 0), np.float32)),
        ('{"instances": [{"x": [1, 2]}, {"x": [3, 4]}]}', dtypes.DOUBLE, np.array([[1.0, 2.0], [3.0, 4.0]])),
        ('{"instances": [NaN, -Infinity]}', dtypes.FLOAT, np.array([np.nan, -np.inf], np.float32)),
        ('{"inputs": {"x": [true], "z": 1}}', dtypes.BOOL, np.array([True])),
        ('{"instances": ["é", {"b64": "/w"}]}', dtypes.STRING, np.array(["é".encode(), b"\xff"], object)),
    ],
)
def test_values(body: str, number: int, expected: np.ndarray) -> None:
    array = parse(body, {"x": number})["x"]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_careful_and_quick_conversion_agree() -> None:
    for number in (dtypes.FLOAT, dtypes.INT8, dtypes.UINT64):
        value = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
        quick = json_tensor.quick_array(value, number)
        careful = json_tensor.careful_array(value, number)
        assert quick is not None
        assert quick.dtype == careful.dtype
        np.testing.assert_array_equal(quick, careful)


@pytest.mark.parametrize(
    ("array", "tokens"),
    [
        (
            np.array([0.1, 1 / 3, 1e10, 16777216, -0.0], np.float32),
            ["0.1", "0.333333343", "1e+10", "16777216.0", "-0.0"],
        ),
        (np.array([0.1, 1 / 3, 123456.5, 1e22]), ["0.1", "0.33333333333333331", "123456.5", "1e+22"]),
        (np.array([np.nan, np.inf, -np.inf], np.float32), ["NaN", "Infinity", "-Infinity"]),
        (np.array([np.finfo(np.float32).max], np.float32), ["3.40282347e+38"]),
        (np.array([2**64 - 1], np.uint64), ["18446744073709551615"]),
        (np.array([True, False]), ["true", "false"]),
    ],
)
def test_number_text(array: np.ndarray, tokens: list[str]) -> None:
    body = json_response.predictions({"y": array}).decode()
    assert body == '{\n    "predictions": [' + ", ".join(tokens) + "\n    ]\n}"


def test_row_layout() -> None:
    outputs = {"a": np.array([[1, 2], [3, 4]]), "b_bytes": np.array([[b"x"], [b"\xff"]], object)}
    assert json_response.predictions(outputs).decode() == (
        '{\n    "predictions": [\n        {\n            "a": [1, 2],\n            "b_bytes": [{\n'
        '                    "b64": "eA=="\n                }]\n        },\n        {\n            "a": [3, 4],\n'
        '            "b_bytes": [{\n                    "b64": "/w=="\n                }]\n        }\n    ]\n}'
    )


def test_column_layout() -> None:
    assert json_response.columns({"y": np.array([[1], [2]])}).decode() == (
        '{\n    "outputs": [\n        [\n            1\n        ],\n        [\n            2\n        ]\n    ]\n}'
    )
    body = json_response.columns({"y": np.array(1.5, np.float32), "z": np.array([], np.int32)}).decode()
    assert body == '{\n    "outputs": {\n        "y": 1.5,\n        "z": []\n    }\n}'
    assert json.loads(json_response.columns({"s": np.array(['q"\n'], object)})) == {"outputs": ['q"\n']}


def test_types_without_json_form_and_no_outputs() -> None:
    with pytest.raises(ServingError, match="Failed to write JSON value for tensor type: half"):
        json_response.columns({"y": np.ones(1, np.float16)})
    for write in (json_response.columns, json_response.predictions):
        with pytest.raises(ServingError, match="empty tensor map"):
            write({})


@pytest.mark.parametrize("shape", [(1, 50), (10, 5), (3, 4, 5), (50, 0), (0, 50)])
def test_large_answers_are_written_in_blocks(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 3
    layouts = json_response.predictions, json_response.columns
    whole = [write({"y": array}) for write in layouts]
    for size in (1, 7, 30):
        monkeypatch.setattr(json_response, "_BLOCK_VALUES", size)
        assert [write({"y": array}) for write in layouts] == whole
