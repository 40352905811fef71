"""Both clients against one server: the same calls give the same results and errors; and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import csv, parquet

from serving.client import Client, Code, RetryPolicy, ServingError, connect
from serving.client.commands import main
from serving.client.model_info import Classification, Regression, VersionStatus
from serving.server import ModelServer
from tests.serving import models
from tests.serving.test_client_retry import Clock

TYPES = {"text": "string", "whole": "int32", "real": "float32", "flag": "bool"}
ENTRY = 'config {{ name: "{}" base_path: "{}" model_platform: "tensorflow" {} }}'
LABEL = 'version_labels { key: "stable" value: 3 }'


def config_of(*entries: str) -> str:
    return f"model_config_list {{ {' '.join(entries)} }}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    models.copy_half_plus_two(path / "m" / "3")
    models.save_identity(path / "same" / "1", TYPES)
    (path / "models.config").write_text(
        config_of(ENTRY.format("m", path / "m", LABEL), ENTRY.format("same", path / "same", ""))
    )
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    with ModelServer(
        model_config_file=folder / "models.config", allow_version_labels_for_unavailable_models=True
    ) as running:
        yield running


def url_of(server: ModelServer, protocol: str) -> str:
    return f"http://127.0.0.1:{server.rest_port}" if protocol == "rest" else f"127.0.0.1:{server.grpc_port}"


@pytest.fixture(scope="module", params=["rest", "grpc"])
def url(request: pytest.FixtureRequest, server: ModelServer) -> str:
    return url_of(server, request.param)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with connect(url) as found:
        yield found


@pytest.fixture(scope="module")
def remote(server: ModelServer) -> Iterator[Client]:
    with connect(url_of(server, "grpc")) as found:
        yield found


ROWS = {"text": ["a", "é"], "whole": [1, 2], "real": [0.5, np.nan], "flag": [True, False]}


def test_lists_become_arrays_of_the_signatures_types(client: Client) -> None:
    outputs = client.predict("same", ROWS)
    assert {alias: array.dtype for alias, array in outputs.items()} == {
        "text": object,
        "whole": np.int32,
        "real": np.float32,
        "flag": bool,
    }
    assert outputs["text"].tolist() == [b"a", "é".encode()]
    np.testing.assert_array_equal(outputs["real"], np.array([0.5, np.nan], np.float32))


def test_zeros_at_the_end_of_strings_stay(client: Client) -> None:
    assert client.predict("same", {**ROWS, "text": [b"a\0", b"\0\0"]})["text"].tolist() == [b"a\0", b"\0\0"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"whole": [1.5, 2]}, "input 'whole' takes int32, but got an array of float64"),
        ({"whole": [2**31, 0]}, "input 'whole' takes int32, but 2147483648 is out of its range"),
        ({"text": np.array([1, 2])}, "input 'text' takes strings, but got an array of int64"),
        ({"text": ["a", None]}, "input 'text' takes strings, but None is none"),
        ({"real": ["a", "b"]}, "input 'real' takes float32, but got an array of object"),
        ({"real": [[1], [2, 3]]}, "input 'real' is no array: "),
    ],
)
def test_values_that_do_not_fit(client: Client, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError, match="INVALID_ARGUMENT: ") as raised:
        client.predict("same", {**ROWS, **inputs})
    assert message in raised.value.message


def test_output_filter(client: Client) -> None:
    assert sorted(client.predict("same", ROWS, output_filter=["real", "flag"])) == ["flag", "real"]


def test_versions_and_labels(client: Client) -> None:
    for which in ({"version": 3}, {"version_label": "stable"}):
        assert client.predict("m", {"x": [[2]]}, **which)["y"].tolist() == [[3.0]]
        assert client.metadata("m", **which).version == 3
    with pytest.raises(ValueError, match=r"give a version .3. or a version_label .stable., not both"):
        client.predict("m", {"x": [[2]]}, version=3, version_label="stable")
    assert client.status("m", version=3) == [VersionStatus(3, "AVAILABLE")]


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        (
            lambda c: c.predict("m", {"x": [[1]]}, signature_name="no"),
            Code.INVALID_ARGUMENT,
            "has no signature 'no', only",
        ),
        (
            lambda c: c.predict("m", {"x": [[1]]}, output_filter=["z"]),
            Code.INVALID_ARGUMENT,
            "has no output 'z', only ['y']",
        ),
        (
            lambda c: c.predict("m", {"x": [[1]]}, version_label="no"),
            Code.INVALID_ARGUMENT,
            "servable version label: no",
        ),
        (lambda c: c.predict("m", {"x": [[1]]}, version=4), Code.NOT_FOUND, "Specific(m, 4)"),
        (lambda c: c.status("m", version=4), Code.NOT_FOUND, "Could not find version 4 of model m"),
        (lambda c: c.classify("m", [{"x": [object()]}]), Code.INVALID_ARGUMENT, "feature 'x' holds object"),
        (lambda c: c.classify("m", [{"x": ["a", 1]}]), Code.INVALID_ARGUMENT, "feature 'x' holds bytes, int"),
        (lambda c: c.classify("m", [{"x": 2**63}]), Code.INVALID_ARGUMENT, "feature 'x' holds 9223372036854775808"),
        (lambda c: c.regress("no", [{"x": 1.0}]), Code.NOT_FOUND, "Latest(no)"),
        (lambda c: c.predict_rows("m", {}), Code.INVALID_ARGUMENT, "the same number of rows, and at least one"),
    ],
)
def test_both_give_the_same_errors(client: Client, call: Callable[[Client], Any], code: Code, message: str) -> None:
    with pytest.raises(ServingError) as raised:
        call(client)
    assert (raised.value.code, message in raised.value.message) == (code, True), raised.value


EXAMPLES = [{"x": 2.0}, {"x": np.array([4], np.float32)}]


def test_classify_and_regress(client: Client) -> None:
    assert client.classify("m", EXAMPLES, signature_name="classify_x_to_y") == [
        (Classification("", 3.0),),
        (Classification("", 4.0),),
    ]
    assert client.regress("m", EXAMPLES, signature_name="regress_x_to_y") == [Regression(3.0), Regression(4.0)]
    shared = client.regress("m", [{}, {"other": "a"}], context={"x": [0.2]}, signature_name="regress_x_to_y")
    assert shared == [Regression(float(np.float32(0.2) / 2 + 2))] * 2


def test_multi_inference(remote: Client, server: ModelServer) -> None:
    results = remote.multi_inference("m", EXAMPLES, {"regress_x_to_y": "regress", "classify_x_to_y": "classify"})
    assert results == {
        "regress_x_to_y": [Regression(3.0), Regression(4.0)],
        "classify_x_to_y": [(Classification("", 3.0),), (Classification("", 4.0),)],
    }
    with connect(url_of(server, "rest")) as rest:
        for call in (lambda: rest.multi_inference("m", EXAMPLES, {}), lambda: rest.reload("")):
            with pytest.raises(ServingError, match=r"UNIMPLEMENTED: REST .*gRPC port"):
                call()


def test_rows_are_sent_in_batches_and_keep_their_order(client: Client) -> None:
    x = np.arange(25, dtype=np.float32)[:, None]
    outputs = client.predict_rows("m", {"x": x}, batch_size=2, max_in_flight=5)
    np.testing.assert_array_equal(outputs["y"], x / 2 + 2)
    with pytest.raises(ServingError, match=r"INVALID_ARGUMENT: rows 0 to 9: "):
        client.predict_rows("m", {"z": x}, batch_size=10)
    with pytest.raises(ValueError, match=r"batch_size \(0\)"):
        client.predict_rows("m", {"x": x}, batch_size=0)


def test_frames(client: Client) -> None:
    frame = pd.DataFrame({**ROWS, "id": [7, 8]}, index=["r", "s"])
    found = client.predict_frame("same", frame, batch_size=1)
    assert found.index.tolist() == ["r", "s"]
    assert {name: found[name].tolist() for name in ("text", "whole", "flag")} == {
        name: ROWS[name] for name in ("text", "whole", "flag")
    }
    table = client.predict_frame("m", pa.table({"x": [2, 4]}))
    assert table.equals(pa.table({"y": pa.array([3, 4], pa.float32())}))


def test_wait_until_ready(url: str) -> None:
    clock = Clock()
    with connect(url, retry=clock.policy()) as client:
        for which in ({}, {"version": 3}, {"version_label": "stable"}):
            client.wait_until_ready("m", **which)
        assert clock.waits == []
        for which, seen in (({"version": 4}, "Could not find version 4"), ({"version_label": "no"}, "label: no")):
            with pytest.raises(ServingError, match=f"DEADLINE_EXCEEDED: model m was not ready within 5 s: .*{seen}"):
                client.wait_until_ready("m", **which, timeout_seconds=5)
        assert sum(clock.waits) == pytest.approx(10)


def test_waiting_ends_when_a_version_cannot_be_loaded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [VersionStatus(1, "LOADING"), VersionStatus(1, "END", "INVALID_ARGUMENT", "no model")]
    monkeypatch.setattr(client, "_status", lambda spec, call: [states.pop(0)])
    monkeypatch.setattr(client, "_retry", Clock().policy())
    with pytest.raises(
        ServingError, match="FAILED_PRECONDITION: model m could not be loaded: version 1 is END no model"
    ):
        client.wait_until_ready("m")


def test_reload(folder: Path) -> None:
    m, same = (ENTRY.format(name, folder / name, "") for name in ("m", "same"))
    file = folder / "other.config"
    file.write_text(config_of(m))
    with ModelServer(model_config_file=file) as server, connect(url_of(server, "grpc")) as client:
        assert client.reload(config_of(m, same)) == {}
        client.wait_until_ready("same")
        assert client.predict("same", ROWS)["whole"].tolist() == [1, 2]
        with pytest.raises(ServingError, match=r"INVALID_ARGUMENT: this is no ModelServerConfig .*1:1"):
            client.reload("model_list {}")
        file.write_text(config_of(same))
        assert run("reload", "--url", url_of(server, "grpc"), "--config", str(file)) == (0, "")
        assert client.status("m")[0].state in ("UNLOADING", "END")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize("output_format", [".jsonl", ".csv", ".parquet", ".npz", ".json"])
@pytest.mark.parametrize("input_format", [".jsonl", ".csv", ".parquet", ".npz", ".json"])
def test_files(client: Client, url: str, tmp_path: Path, input_format: str, output_format: str) -> None:
    source, target = tmp_path / f"in{input_format}", tmp_path / f"out{output_format}"
    rows = {"text": ["007", "é"], "whole": [1, 2], "real": [0.5, 2.0], "flag": [True, False]}
    instances = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    {
        ".jsonl": lambda: source.write_text("\n\n".join(map(json.dumps, instances))),
        ".json": lambda: source.write_text(json.dumps({"instances": instances})),
        ".csv": lambda: csv.write_csv(pa.table({**rows, "id": [1, 2]}), source),
        ".parquet": lambda: parquet.write_table(pa.table(rows), source),
        ".npz": lambda: np.savez(source, **rows),
    }[input_format]()
    options = ["--url", url, "--model", "same", "--input", str(source), "--output", str(target)]
    assert run("predict", *options, "--batch-size", "1") == (0, "")
    readers: dict[str, Callable[[], Any]] = {
        ".jsonl": lambda: list(map(json.loads, target.read_text().splitlines())),
        ".json": lambda: json.loads(target.read_text())["predictions"],
        ".csv": lambda: csv.read_csv(
            target, convert_options=csv.ConvertOptions(column_types={"text": "str"})
        ).to_pylist(),
        ".parquet": lambda: parquet.read_table(target).to_pylist(),
        ".npz": lambda: pd.DataFrame(dict(np.load(target))).to_dict("records"),
    }
    assert readers[output_format]() == instances
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


def test_npy(url: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[2.0], [4.0]]))
    options = ["--url", url, "--model", "m", "--input", str(tmp_path / "x.npy")]
    assert run("predict", *options, "--output", str(tmp_path / "y.npy")) == (0, "")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.array([[3], [4]], np.float32))
    assert run("predict", *options) == (0, '{\n    "predictions": [[3.0], [4.0]\n    ]\n}\n')


def test_commands(url: str, tmp_path: Path) -> None:
    where = ["--url", url, "--model", "m"]
    assert run("status", *where) == (0, "version  state      error\n3        AVAILABLE  OK\n")
    output = run("status", *where, "--version", "3", "--json")[1]
    assert json.loads(output) == [{"version": 3, "state": "AVAILABLE", "error_code": "OK", "error_message": ""}]
    lines = run("metadata", *where, "--version-label", "stable")[1].splitlines()
    assert lines[:2] == ["model m, version 3", "signature                  name     type    shape"]
    assert "serving_default    input   x        float   [-1, 1]" in lines
    document = json.loads(run("metadata", *where, "--json")[1])
    assert document["signatures"]["serving_default"]["outputs"] == {"y": {"dtype": "DT_FLOAT", "shape": [-1, 1]}}
    assert run("wait", *where, "--version", "3") == (0, "")
    body = ["--json", '{"examples": [{"x": 0.2}], "context": {"a": {"b64": "/w=="}}}']
    assert run("classify", *where, "--signature", "classify_x_to_y", *body) == (
        0,
        '{\n    "results": [[["", 2.1]]\n    ]\n}\n',
    )
    (tmp_path / "body.json").write_text('{"examples": [{"x": [2.0]}, {"x": 0.2}]}')
    file = ["--input", str(tmp_path / "body.json")]
    assert run("regress", *where, "--signature", "regress_x_to_y", *file) == (0, '{\n    "results": [3.0, 2.1]\n}\n')


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["predict"], 2, "give the request with --json or with --input"),
        (["predict", "--json", "{}", "--version", "1", "--version-label", "a"], 2, "not both"),
        (["predict", "--input", "/nowhere.json"], 2, "'/nowhere.json' does not exist"),
        (["predict", "--json", "{}", "--output", "x.txt"], 2, "x.txt must end in one of .json, .jsonl, .csv"),
        (["predict", "--json", "{}", "--header", "Host"], 2, "a header is NAME=VALUE, but got 'Host'"),
        (["predict", "--json", "{}", "--client-cert", __file__], 2, "needs both its certificate file and its key file"),
        (["predict", "--json", "{}", "--token", "a", "--token-file", __file__], 2, "--token or --token-file, not both"),
        (["predict", "--json", "{"], 1, "Error: INVALID_ARGUMENT: JSON Parse error"),
        (["predict", "--json", "{}", "--signature", "no"], 1, "model m has no signature 'no', only"),
        (["predict", "--json", '{"signature_name": "a"}'], 1, "name the signature with --signature instead"),
        (["classify", "--json", '{"examples": 1}'], 1, 'the request must look like {"examples": [{"feature"'),
        (["wait", "--version", "9", "--timeout", "0.01"], 3, "DEADLINE_EXCEEDED: model m was not ready within 0.01 s"),
    ],
)
def test_exit_codes(url: str, arguments: list[str], exit_code: int, message: str) -> None:
    command, *options = arguments
    found, output = run(command, "--url", url, "--model", "m", *options)
    assert (found, message in output) == (exit_code, True), output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "[1.0]\n[1", "a.jsonl: line 2: JSON Parse error"),
        ("a.csv", "x\n1\nb\n", "a.csv: In CSV column #0: CSV conversion error to double: invalid value 'b'"),
        ("a.csv", "z,y\n1,2\n", "a.csv: the table lacks columns for the inputs {'x': (-1, 1)}; it has ['z', 'y']"),
        ("a.npy", "", "a.npy: No data left in file"),
        ("a.npz", "PK\x03\x04", "a.npz: File is not a zip file"),
        ("a.parquet", "1", "a.parquet: "),
    ],
)
def test_files_that_do_not_fit(url: str, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    output = str(tmp_path / "out.csv")
    found = run("predict", "--url", url, "--model", "m", "--input", str(tmp_path / name), "--output", output)
    assert (found[0], message in found[1]) == (1, True), found[1]
    assert not Path(output).exists()


def test_nothing_is_left_of_an_output_that_does_not_fit(url: str, tmp_path: Path) -> None:
    body = ["--json", '{"inputs": {"text": [[["a"]]], "whole": 1, "real": 1, "flag": true}}']
    for name, message in (
        ("out.csv", "CSV has one value a cell, but ['text'] have more"),
        ("out.npy", "holds one output"),
    ):
        found = run("predict", "--url", url, "--model", "same", *body, "--output", str(tmp_path / name))
        assert (found[0], message in found[1]) == (1, True), found[1]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_file_that_broke_off(server: ModelServer, tmp_path: Path) -> None:
    body = '{"inputs": {"text": {"b64": "/w=="}, "whole": 1, "real": 1, "flag": true}}'
    where = ["--url", url_of(server, "grpc"), "--model", "same", "--output", str(tmp_path / "out.npz")]
    exit_code, output = run("predict", *where, "--json", body)
    assert (exit_code, "an output holds bytes that are no text" in output) == (1, True), output
    assert list(tmp_path.iterdir()) == []


def test_nobody_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    for url in ("http://127.0.0.1:1", "127.0.0.1:1"):
        options = ["--url", url, "--model", "m", "--retries", "0", "--token-file", str(token)]
        exit_code, output = run("status", *options)
        assert exit_code == 3
        assert output.startswith("Error: UNAVAILABLE: ")
        assert output.endswith("and is this the port of REST (http://...) or of gRPC (host:port)?\n")
        assert len(output.splitlines()) == 1


def test_connect_reads_the_scheme() -> None:
    with connect("grpc://127.0.0.1:1", retry=RetryPolicy(max_retries=0)) as client:
        assert type(client).__name__ == "GrpcClient"
    with pytest.raises(ValueError, match="a REST URL looks like http://host:port, but got 'ftp://x'; one of gRPC is"):
        connect("ftp://x")
