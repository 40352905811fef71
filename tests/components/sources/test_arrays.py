from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.errors import DataError
from components.ingest import sources
from components.ingest.columns import features_of
from tests.components.sources import read

ARRAYS = {
    "image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    "vector": np.arange(6, dtype=np.float64).reshape(3, 2),
    "n": np.arange(3, dtype=np.int32),
    "word": np.array(["a", "b", "c"]),
}


@pytest.mark.parametrize("folder", [False, True])
def test_numpy(tmp_path, folder):
    if folder:
        for name, array in ARRAYS.items():
            np.save(tmp_path / f"{name}.npy", array)
    else:
        np.savez(tmp_path / "x.npz", **ARRAYS)
    table = read(sources.numpy_arrays, tmp_path if folder else tmp_path / "x.npz")
    features = features_of(table.schema)
    assert (features["image"].type, features["image"].shape) == ("uint8", (2, 2, 1))
    assert (features["vector"].type, features["vector"].shape) == ("float", (2,))
    assert table["n"].to_pylist() == [0, 1, 2]
    assert table["word"].to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, "same number of rows: a 3, b 2"),
        ({"a": np.array([{}, {}])}, "cannot be read"),
        ({"a": np.zeros(3, complex)}, "array 'a' holds complex128"),
    ],
)
def test_numpy_refuses(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(sources.numpy_arrays, tmp_path / "x.npz")


def test_types_of_arrays_come_through_whole(tmp_path):
    arrays = {
        "i": np.array([2**53 + 1, -(2**63)]),
        "u": np.array([2**64 - 1, 0], np.uint64),
        "b": np.array([True, False]),
        "f": np.array([np.nan, 0.1]),
        "t": np.array(["2020-01-02T03:04:05.000000006", "NaT"], "datetime64[ns]"),
        "s": np.array(["", "ä"]),
        "v": np.array([[0.1, 0.2], [0.3, 0.4]]),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    table = read(sources.numpy_arrays, tmp_path / "x.npz")
    assert table.schema.types[:6] == [
        *(pa.int64(), pa.uint64(), pa.bool_(), pa.float64(), pa.timestamp("ns"), pa.string())
    ]
    for name in ("i", "u", "b", "s"):
        assert table[name].to_pylist() == arrays[name].tolist()
    assert table["t"].cast(pa.int64()).to_pylist() == [arrays["t"].astype(np.int64)[0], None]
    np.testing.assert_array_equal(table["f"].to_numpy(), arrays["f"])
    np.testing.assert_array_equal(table["v"].combine_chunks().to_numpy_ndarray(), arrays["v"])


def test_whole_numbers_that_no_tensor_holds_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.full((2, 2), 2**63, np.uint64))
    with pytest.raises(
        DataError, match=r"array 'a' holds 9223372036854775808; tensors of whole numbers go to 2\^63 - 1"
    ):
        read(sources.numpy_arrays, tmp_path / "x.npz")
