"""export: every form answers as the model does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorflow as tf
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from components import formats, model_files
from components.artifacts import read_manifest
from components.config import CompressConfig, ExportConfig, OptimizeConfig
from components.convert import Converter, convert
from components.errors import HeadraceError
from components.examples import ExamplesInfo, Feature, read_arrays
from components.export import export as export_step
from components.export import write_saved_model
from components.preprocessing import FittedOp, Preprocessing
from models import tabular
from models.spec import FeatureSpec
from serving import warmup
from serving.backends.saved_model import SavedModel
from tests.conftest import StepRun

FORMS = ["saved_model", "tflite_float32", "onnx", "tflite_float16", "tflite_dynamic_range", "tflite_int8"]


@pytest.fixture(scope="module")
def held_out(taxi: StepRun) -> dict[str, np.ndarray]:
    return {name: values[:50] for name, values in read_arrays(taxi.path("examples"), "test").items()}


@pytest.fixture(scope="module")
def expected(taxi: StepRun, held_out: dict[str, np.ndarray]) -> np.ndarray:
    preprocessing = Preprocessing.load(taxi.path("transform"))
    predict = model_files.Predictor(model_files.load_model(taxi.path("model")), preprocessing.output_spec)
    return predict(preprocessing.transform_in_batches(held_out))


@pytest.fixture(scope="module")
def uncompressed(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress` gives where no form is asked for."""
    path = tmp_path_factory.mktemp("uncompressed") / "compressed"
    taxi.call("compress", path, CompressConfig(formats=[]))
    return path


def export(taxi: StepRun, path: Path, compressed: Path, **settings: Any) -> Any:
    """The step, by default of the SavedModel alone."""
    inputs = {name: taxi.path(name) for name in ("examples", "statistics", "transform", "model", "optimized")}
    config = ExportConfig(**{"formats": [], **settings})
    return taxi.call("export", path, config, **inputs, compressed=compressed)


def warmup_requests(saved_model: Path) -> list[dict[str, np.ndarray]]:
    """The inputs of each request."""
    file = saved_model / "assets.extra" / "tf_serving_warmup_requests"
    records = tf.data.TFRecordDataset(str(file)).as_numpy_iterator() if file.exists() else []
    requests = [PredictionLog.FromString(record).predict_log.request for record in records]
    return [{name: tf.make_ndarray(tensor) for name, tensor in each.inputs.items()} for each in requests]


def test_an_export_lists_every_form_with_its_size(taxi: StepRun) -> None:
    result, exported = taxi.result("export"), taxi.path("exported")
    assert list(result.formats) == FORMS
    for form in formats.read_formats(exported):
        assert result.formats[form.name] == formats.size_bytes(exported / form.path) > 0


@pytest.mark.parametrize("name", FORMS)
def test_every_form_answers_as_the_keras_model(taxi: StepRun, held_out, expected, name: str) -> None:
    exported = taxi.path("exported")
    form = next(form for form in formats.read_formats(exported) if form.name == name)
    transformed = Preprocessing.load(taxi.path("transform")).transform_in_batches(held_out)
    run = formats.make_runner(form, exported, "probabilities")
    answers = formats.answer_in_batches(run, held_out if form.inputs == "raw" else transformed, batch_size=7)
    np.testing.assert_allclose(answers, expected, atol=1e-5 if form.exact else 0.1)


def test_the_saved_model_loads_with_tensorflow_alone_and_takes_raw_features(
    taxi: StepRun, held_out, expected, tmp_path: Path
) -> None:
    names = Preprocessing.load(taxi.path("transform")).raw_inputs
    np.savez(tmp_path / "raw.npz", **{name: held_out[name] for name in names if held_out[name].dtype != object})
    texts = {name: [value.decode() for value in held_out[name]] for name in names if held_out[name].dtype == object}
    script = f"""
import json, sys
import numpy as np, tensorflow as tf
signature = tf.saved_model.load({str(taxi.path("exported") / "saved_model")!r}).signatures["serving_default"]
raw = dict(np.load({str(tmp_path / "raw.npz")!r}), **json.loads({json.dumps(texts)!r}))
out = signature(**{{name: tf.constant(values) for name, values in raw.items()}})
assert not [m for m in sys.modules if m.split(".")[0] in ("components", "models")]
print(json.dumps([out["probabilities"].numpy().tolist(), [l.decode() for l in out["label"].numpy()]]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    probabilities, labels = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(probabilities, expected, atol=1e-6)
    assert labels == [["no", "yes"][i] for i in expected.argmax(axis=1)]


def test_serve_examples_takes_examples_without_the_label(taxi: StepRun, expected) -> None:
    files = sorted((taxi.path("examples") / "test").glob("*.tfrecord"))
    examples = []
    for record in tf.data.TFRecordDataset([str(file) for file in files]).take(50):
        example = tf.train.Example.FromString(record.numpy())
        del example.features.feature["big_tipper"]
        examples.append(example.SerializeToString())
    signature = tf.saved_model.load(str(taxi.path("exported") / "saved_model")).signatures["serve_examples"]
    np.testing.assert_allclose(signature(examples=tf.constant(examples))["probabilities"], expected, atol=1e-6)


def test_transform_signature_feeds_the_split_off_forms(taxi: StepRun, held_out) -> None:
    preprocessing = Preprocessing.load(taxi.path("transform"))
    signature = tf.saved_model.load(str(taxi.path("exported") / "saved_model")).signatures["transform"]
    out = signature(**{name: tf.constant(held_out[name]) for name in preprocessing.raw_inputs})
    for name, values in preprocessing.transform_in_batches(held_out).items():
        np.testing.assert_allclose(out[name], values, rtol=1e-6)


def test_the_saved_model_stores_each_weight_once(taxi: StepRun) -> None:
    model = model_files.load_model(taxi.path("model"))
    variables = taxi.path("exported") / "saved_model" / "variables" / "variables.data-00000-of-00001"
    weights = sum(weight.nbytes for weight in model.get_weights())
    assert weights <= variables.stat().st_size < 1.2 * weights + 20_000


def test_labels_and_schema_travel_with_the_model(taxi: StepRun) -> None:
    extras = taxi.path("exported") / "saved_model" / "assets.extra"
    assert (extras / "labels.txt").read_text() == "no\nyes\n"
    assert (extras / "schema.yaml").read_bytes() == (taxi.path("statistics") / "schema.yaml").read_bytes()


def test_onnx_keeps_names_and_a_free_batch(taxi: StepRun) -> None:
    graph = onnx.load(taxi.path("exported") / "onnx" / "model.onnx").graph
    assert sorted(node.name for node in graph.input) == sorted(Preprocessing.load(taxi.path("transform")).input_spec)
    assert [node.name for node in graph.output] == ["probabilities"]
    assert {node.type.tensor_type.shape.dim[0].dim_param for node in graph.input} == {"batch"}


def test_the_opset_is_the_one_asked_for(taxi: StepRun, uncompressed: Path, tmp_path: Path) -> None:
    for opset in (15, 17):
        exported = tmp_path / f"exported_{opset}"
        export(taxi, exported, uncompressed, formats=["onnx"], onnx_opset=opset)
        opsets = onnx.load(exported / "onnx" / "model.onnx").opset_import
        assert [each.version for each in opsets if each.domain == ""] == [opset]


def test_export_writes_only_the_forms_asked_for(taxi: StepRun, uncompressed: Path, tmp_path: Path) -> None:
    assert list(export(taxi, tmp_path / "exported", uncompressed).formats) == ["saved_model"]


def test_every_other_kind_is_written_with_the_names_of_the_classes(
    taxi: StepRun, uncompressed: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    kinds = ["tflite", "onnx", "openvino", "coreml", "tensorrt"]
    result = export(taxi, exported, uncompressed, formats=kinds)
    names = ["saved_model", "tflite_float32", "onnx", "openvino", "coreml", "tensorrt"]
    assert list(result.formats) == names and all(size > 1000 for size in result.formats.values())
    assert all(form.exact for form in formats.read_formats(exported))
    for kind in ("onnx/model.onnx", "tensorrt/float32/model.onnx"):
        metadata = {each.key: each.value for each in onnx.load(exported / kind).metadata_props}
        assert json.loads(metadata["labels"]) == ["no", "yes"]
    assert "probabilities" in (exported / "pictures/onnx.svg").read_text()


def test_forms_that_were_converted_apart_make_the_same_artifact(
    taxi: StepRun, uncompressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExportConfig(formats=["tflite", "onnx"])
    export(taxi, tmp_path / "whole", uncompressed, formats=config.formats)
    inputs = {name: taxi.path(name) for name in ("examples", "transform", "model", "optimized")}
    for kind in config.formats:
        assert convert(**inputs, converted=tmp_path / kind, kind=kind, config=config).kind == kind
    monkeypatch.setattr(Converter, "convert", None)
    converted = [tmp_path / "onnx", tmp_path / "tflite"]
    inputs |= {"statistics": taxi.path("statistics"), "compressed": uncompressed}
    export_step(**inputs, exported=tmp_path / "apart", config=config, converted=converted)
    whole, apart = (read_manifest(tmp_path / name) for name in ("whole", "apart"))
    assert apart == whole
    assert (tmp_path / "apart/pictures/onnx.svg").is_file()


def test_the_optimized_model_is_an_inexact_form(taxi: StepRun, uncompressed: Path, tmp_path: Path) -> None:
    student = {"name": "tabular", "args": {"hidden_dims": [8], "embedding_dim": 2}}
    stages = [{"method": "distill", "epochs": 1, "student": student}]
    optimized = tmp_path / "optimized"
    settings = {"stages": stages, "train": taxi.config.step_config("train")}
    taxi.call("optimize", optimized, OptimizeConfig.model_validate(settings))
    inputs = {name: taxi.path(name) for name in ("examples", "statistics", "transform", "model")}
    config = ExportConfig(formats=["tflite"], model="optimized")
    exported = tmp_path / "exported"
    taxi.call("export", exported, config, **inputs, optimized=optimized, compressed=uncompressed)
    assert [(form.name, form.exact) for form in formats.read_formats(exported)] == [
        ("saved_model", False),
        ("tflite_float32", False),
    ]
    small, large = (path / "tflite/model_float32.tflite" for path in (exported, taxi.path("exported")))
    assert small.stat().st_size < 0.8 * large.stat().st_size


def test_classify_answers_for_every_class(taxi: StepRun, expected) -> None:
    files = sorted((taxi.path("examples") / "test").glob("*.tfrecord"))
    records = list(tf.data.TFRecordDataset([str(file) for file in files]).take(50).as_numpy_iterator())
    served = SavedModel(taxi.path("exported") / "saved_model")
    classified = served.run("classify", {"inputs": np.array(records, object)})
    np.testing.assert_allclose(classified["scores"], expected, atol=1e-6)
    assert classified["classes"].tolist() == [[b"no", b"yes"]] * 50
    assert served.signatures["classify"].proto.method_name == "tensorflow/serving/classify"


def test_the_server_warms_up_with_test_examples(taxi: StepRun) -> None:
    folder = taxi.path("exported") / "saved_model"
    test = read_arrays(taxi.path("examples"), "test")
    rows = set(
        zip(*(test[name].tolist() for name in Preprocessing.load(taxi.path("transform")).raw_inputs), strict=True)
    )
    sizes = []
    for inputs in warmup_requests(folder):
        chosen = list(zip(*(inputs[name].tolist() for name in sorted(inputs)), strict=True))
        sizes.append(len(chosen))
        assert {repr(row) for row in chosen} <= {repr(row) for row in rows}
    assert sizes == [1] * 8 + [32]
    assert warmup.replay(SavedModel(folder), folder) == 9


def test_settings_of_the_saved_model(taxi: StepRun, uncompressed: Path, held_out, expected, tmp_path: Path) -> None:
    head = model_files.load_model(taxi.path("model")).layers[-1].name
    settings = {"features": [head], "weights_dtype": "bfloat16", "num_warmup_examples": 2}
    export(taxi, tmp_path / "a", uncompressed, **settings)
    export(taxi, tmp_path / "again", uncompressed, **settings)
    assert read_manifest(tmp_path / "a").files == read_manifest(tmp_path / "again").files
    served = SavedModel(tmp_path / "a" / "saved_model")
    logits = served.run("features", {name: held_out[name] for name in served.signatures["features"].inputs})[head]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[:, 0])), expected[:, 1], atol=0.02)
    assert [form.exact for form in formats.read_formats(tmp_path / "a")] == [False]
    variables = "variables/variables.data-00000-of-00001"
    halved, whole = (path / "saved_model" / variables for path in (tmp_path / "a", taxi.path("exported")))
    assert halved.stat().st_size < 0.9 * whole.stat().st_size
    assert len(warmup_requests(tmp_path / "a" / "saved_model")) == 3
    export(taxi, tmp_path / "b", uncompressed, **settings, seed=1)
    first, other = (warmup_requests(tmp_path / name / "saved_model")[0] for name in "ab")
    assert any(first[name] != other[name] for name in first)


def test_features_that_no_layer_matches_stop_the_step(taxi: StepRun, uncompressed: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"features: no layer of model .* matches 'blok\*'"):
        export(taxi, tmp_path / "exported", uncompressed, features=["blok*"])
    assert not (tmp_path / "exported").exists()


def test_a_regression_is_served_by_regress(tmp_path: Path) -> None:
    columns = {"width": Feature("float"), "unused": Feature("string"), "price": Feature("float")}
    info = ExamplesInfo(columns, "price", "regression", None, {"train": 1})
    params = {"mean": 2.0, "std": 3.0, "log": False, "missing_indicator": True}
    fitted = {"width": FittedOp("normalize", ("width",), params, FeatureSpec((2,), "float32"))}
    preprocessing = Preprocessing(info, fitted, [])
    network = tabular.build(preprocessing.input_spec, preprocessing.output_spec, hidden_dims=(8,))
    raw = {"width": np.array([1.0, np.nan, 5.0], np.float32)}
    write_saved_model(preprocessing, network, tmp_path / "m", ExportConfig(num_warmup_examples=0), raw)
    served = SavedModel(tmp_path / "m")
    value = served.run("serving_default", raw)["value"]
    np.testing.assert_allclose(value, network(preprocessing(raw))[:, 0], atol=1e-6)
    examples = [tf.train.Example(), tf.train.Example(), tf.train.Example()]
    for example, width in zip(examples[::2], (1.0, 5.0), strict=True):
        example.features.feature["width"].float_list.value.append(width)
    serialized = np.array([example.SerializeToString() for example in examples], object)
    assert served.run("regress", {"inputs": serialized})["outputs"].tolist() == value.tolist()
    assert "classify" not in served.signatures
    assert list((tmp_path / "m" / "assets.extra").iterdir()) == []  # neither labels nor warm-up requests
