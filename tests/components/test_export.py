"""compress, export, verify and push: every form answers as the model does, and nothing unproven is pushed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

from components import artifacts, formats, model_files
from components.config import CompressConfig, ExportConfig, PushConfig, VerifyConfig
from components.errors import ArtifactError, ConfigError, HeadraceError, NotBlessedError
from components.examples import read_arrays
from components.export import ServedModel
from components.preprocessing import Preprocessing
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


def test_int8_computes_in_integers_between_its_inputs_and_its_output(taxi: StepRun) -> None:
    interpreter = Interpreter(model_path=str(taxi.path("exported") / "tflite" / "model_int8.tflite"))
    interpreter.allocate_tensors()
    ends = {detail["index"] for detail in (*interpreter.get_input_details(), *interpreter.get_output_details())}
    inside = [detail for detail in interpreter.get_tensor_details() if detail["index"] not in ends]
    assert not [detail["name"] for detail in inside if detail["dtype"] == np.float32]
    assert [detail for detail in inside if detail["dtype"] == np.int8]


def test_compressed_forms_are_smaller(taxi: StepRun) -> None:
    sizes = taxi.result("export").formats
    assert max(sizes["tflite_int8"], sizes["tflite_dynamic_range"]) < sizes["tflite_float16"] < sizes["tflite_float32"]


def test_onnx_keeps_names_and_a_free_batch(taxi: StepRun) -> None:
    import onnx

    graph = onnx.load(taxi.path("exported") / "onnx" / "model.onnx").graph
    assert sorted(node.name for node in graph.input) == sorted(Preprocessing.load(taxi.path("transform")).input_spec)
    assert [node.name for node in graph.output] == ["probabilities"]
    assert {node.type.tensor_type.shape.dim[0].dim_param for node in graph.input} == {"batch"}


def test_the_opset_is_the_one_asked_for(taxi: StepRun, tmp_path: Path) -> None:
    import onnx

    inputs = {name: taxi.path(name) for name in ("statistics", "transform", "model")}
    none = tmp_path / "compressed"
    taxi.call("compress", none, CompressConfig(formats=[], metric="auc"))
    for opset in (15, 17):
        exported = tmp_path / f"exported_{opset}"
        config = ExportConfig(formats=["onnx"], onnx_opset=opset)
        taxi.call("export", exported, config, **inputs, compressed=none)
        opsets = onnx.load(exported / "onnx" / "model.onnx").opset_import
        assert [each.version for each in opsets if each.domain == ""] == [opset]


def test_a_form_passes_if_its_drop_is_at_most_the_largest_allowed(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = formats.to_tflite(_other_core(taxi), "float32")
    monkeypatch.setattr(formats, "to_tflite", lambda core, form, calibration=None: worse)

    def compress(name: str, max_drop: float) -> dict[str, Any]:
        settings = {"formats": ["float16"], "metric": "loss", "max_drop": max_drop, "min_top1_agreement": 0.0}
        return taxi.call("compress", tmp_path / name, CompressConfig.model_validate(settings)).formats[0]

    row = compress("measured", 1e9)
    assert row["drop"] == pytest.approx(row["value"] - row["baseline_value"])
    assert row["drop"] > 0.01
    assert compress("above", row["drop"] * 1.01)["passed"]
    below = compress("below", row["drop"] * 0.99)
    assert not below["passed"]
    assert f"loss falls by {row['drop']:.4f}" in below["reason"]
    assert [form.name for form in formats.read_formats(tmp_path / "above")] == ["tflite_float16"]
    assert formats.read_formats(tmp_path / "below") == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_calibration_examples": 20}], ids=str)
def test_calibration_follows_from_seed_and_number_of_examples(
    taxi: StepRun, tmp_path: Path, change: dict[str, int]
) -> None:
    def int8(name: str, **settings: int) -> bytes:
        lax = {"formats": ["int8"], "metric": "loss", "max_drop": 1e9, "min_top1_agreement": 0.0}
        settings = {"num_calibration_examples": 5, "seed": 0, **settings}
        taxi.call("compress", tmp_path / name, CompressConfig.model_validate({**lax, **settings}))
        return (tmp_path / name / "tflite" / "model_int8.tflite").read_bytes()

    assert int8("a") == int8("b") != int8("c", **change)


def test_a_form_that_answers_otherwise_is_left_out_or_stops_the_run(taxi: StepRun, tmp_path: Path) -> None:
    strict = {"formats": ["int8"], "metric": "auc", "min_top1_agreement": 1.0, "num_calibration_examples": 1}
    result = taxi.call("compress", tmp_path / "b", CompressConfig.model_validate(strict))
    assert not result.formats[0]["passed"]
    assert "answers as the Keras model does on" in result.formats[0]["reason"]
    assert formats.read_formats(tmp_path / "b") == []
    assert list((tmp_path / "b" / "tflite").iterdir()) == []
    with pytest.raises(HeadraceError, match="Compressed forms fail their gate: tflite_int8"):
        taxi.call("compress", tmp_path / "c", CompressConfig.model_validate({**strict, "on_failure": "fail"}))
    assert not (tmp_path / "c").exists()


def test_compress_refuses_a_metric_of_another_task(taxi: StepRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compress\.metric: a binary task has no metric 'macro_f1'"):
        taxi.call("compress", tmp_path / "a", CompressConfig(metric="macro_f1"))


def test_export_writes_only_the_forms_asked_for(taxi: StepRun, tmp_path: Path) -> None:
    inputs = {name: taxi.path(name) for name in ("statistics", "transform", "model")}
    none = tmp_path / "compressed"
    taxi.call("compress", none, CompressConfig(formats=[], metric="auc"))
    result = taxi.call("export", tmp_path / "exported", ExportConfig(formats=[]), **inputs, compressed=none)
    assert list(result.formats) == ["saved_model"]


def test_the_proof_covers_every_form_and_both_protocols(taxi: StepRun) -> None:
    result = taxi.result("verify")
    assert [row["format"] for row in result.formats] == [*FORMS, "saved_model: tf.Example"]
    assert all(row["passed"] and row["num_examples"] == 200 for row in result.formats)
    assert set(result.server) == {"grpc", "rest"}
    assert all(row["passed"] and row["max_abs_difference"] < 1e-5 for row in result.server.values())
    for row in result.formats[:-1]:
        assert 0 < row["latency_ms_batch_1"] < 1000
    written = json.loads((taxi.path("proof") / "proof.json").read_text())["formats"]
    # Latencies are in the manifest alone: the same proof has the same bytes.
    timeless = [{key: value for key, value in row.items() if "latency" not in key} for row in result.formats]
    assert written == timeless != result.formats


def copy_of(artifact: Path, path: Path, step: str, taxi: StepRun, change: Any) -> Path:
    """An artifact like `artifact` with a change made to its files, and a manifest that agrees with them."""
    shutil.copytree(artifact, path)
    change(path)
    old = artifacts.read_manifest(path)
    files = {
        name: {"size_bytes": (path / name).stat().st_size, "sha256": artifacts.digest_file(path / name)}
        for name in old.files
    }
    manifest = replace(old, files=files, digest=artifacts.digest_of(files))
    (path / artifacts.MANIFEST).write_text(json.dumps(manifest.__dict__))
    return path


@pytest.mark.parametrize("name", ["tflite_float32", "onnx"])
def test_a_form_of_another_model_fails_the_proof(taxi: StepRun, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    core = _other_core(taxi)
    file = "tflite/model_float32.tflite" if name == "tflite_float32" else "onnx/model.onnx"

    def swap(path: Path) -> None:
        if name == "onnx":
            formats.to_onnx(core, 17, path / file)
        else:
            (path / file).write_bytes(formats.to_tflite(core, "float32"))

    exported = copy_of(taxi.path("exported"), other, "export", taxi, swap)
    inputs = {key: taxi.path(key) for key in ("examples", "transform", "model")}
    with pytest.raises(HeadraceError, match=rf"Not what was trained: {name} \(largest difference"):
        taxi.call("verify", tmp_path / "proof", VerifyConfig(num_examples=50), **inputs, exported=exported)
    assert not (tmp_path / "proof").exists()


def _other_network(taxi: StepRun) -> keras.Model:
    model = model_files.load_model(taxi.path("model"))
    model.set_weights([weight + 0.5 for weight in model.get_weights()])
    return model


def _other_core(taxi: StepRun) -> formats.Core:
    return formats.Core(Preprocessing.load(taxi.path("transform")), _other_network(taxi))


def _verify(taxi: StepRun, proof: Path, exported: Path, **settings: Any) -> Any:
    inputs = {key: taxi.path(key) for key in ("examples", "transform", "model")}
    config = VerifyConfig(**{"num_examples": 50, "num_server_examples": 20, **settings})
    return taxi.call("verify", proof, config, **inputs, exported=exported)


def _keep_forms(exported: Path, *names: str) -> None:
    kept = [form for form in formats.read_formats(exported) if form.name in names]
    formats.write_formats(kept, exported)


def test_a_saved_model_of_another_model_fails_over_both_protocols_and_as_examples(
    taxi: StepRun, tmp_path: Path
) -> None:
    def swap(path: Path) -> None:
        served = ServedModel(Preprocessing.load(taxi.path("transform")), _other_network(taxi))
        served.save(path / "saved_model")
        # What is compared first is gone, so that the comparisons after it have to find the difference.
        _keep_forms(path, "tflite_float32")

    exported = copy_of(taxi.path("exported"), tmp_path / "other", "export", taxi, swap)
    with pytest.raises(HeadraceError) as caught:
        _verify(taxi, tmp_path / "proof", exported)
    for name in ("saved_model: tf.Example", "server over grpc", "server over rest"):
        assert f"{name} (largest difference" in str(caught.value)
    assert "tflite_float32 (" not in str(caught.value)
    assert not (tmp_path / "proof").exists()


@pytest.fixture(scope="module")
def differing(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with one TFLite file, which differs from the model."""

    def swap(path: Path) -> None:
        (path / "tflite" / "model_float32.tflite").write_bytes(formats.to_tflite(_other_core(taxi), "float32"))
        _keep_forms(path, "tflite_float32")

    return copy_of(taxi.path("exported"), tmp_path_factory.mktemp("differing") / "exported", "export", taxi, swap)


def test_the_limits_of_the_proof_decide(taxi: StepRun, differing: Path, tmp_path: Path) -> None:
    lax = {"max_abs_difference": 1.0, "min_top1_agreement": 0.0}
    row = _verify(taxi, tmp_path / "lax", differing, **lax).formats[0]
    difference, agreement = row["max_abs_difference"], row["top1_agreement"]
    assert difference > 1e-3 and agreement < 1
    _verify(taxi, tmp_path / "near", differing, max_abs_difference=difference * 1.01, min_top1_agreement=agreement)
    for name, change in (
        ("difference", {"max_abs_difference": difference * 0.99}),
        ("agreement", {"min_top1_agreement": agreement + 0.01}),
    ):
        with pytest.raises(
            HeadraceError, match=r"Not what was trained: tflite_float32 \(largest difference [^,]*, same"
        ):
            _verify(taxi, tmp_path / name, differing, **{**lax, **change})


def test_the_examples_of_the_proof_follow_from_its_seed_and_the_server_gets_as_many_as_asked(
    taxi: StepRun, differing: Path, tmp_path: Path
) -> None:
    lax = {"max_abs_difference": 1.0, "min_top1_agreement": 0.0}
    results = {
        name: _verify(taxi, tmp_path / name, differing, **lax, seed=seed, num_server_examples=count)
        for name, seed, count in (("a", 0, 3), ("b", 0, 17), ("c", 1, 3))
    }
    counts = {name: {row["num_examples"] for row in result.server.values()} for name, result in results.items()}
    assert counts == {"a": {3}, "b": {17}, "c": {3}}
    requests = {name: (tmp_path / name / "example_request.json").read_text() for name in results}
    assert requests["a"] == requests["b"] != requests["c"]


def push(taxi: StepRun, path: Path, destination: Path, keep: int = 2, **changed: Path) -> Any:
    inputs = {name: changed.get(name, taxi.path(name)) for name in ("model", "evaluation", "exported", "proof")}
    config = PushConfig(destination=str(destination), name="taxi", keep_versions=keep, resolved_config="name: taxi\n")
    return taxi.call("push", path, config, **inputs)


def test_push_writes_a_version_that_tf_serving_reads_and_does_it_once(taxi: StepRun, tmp_path: Path) -> None:
    result = push(taxi, tmp_path / "pushed", tmp_path / "served")
    version = tmp_path / "served" / "taxi" / "1"
    assert (result.version, result.version_path, result.rollback_version) == (1, str(version), None)
    assert sorted(p.name for p in version.iterdir() if p.name != "fingerprint.pb") == [
        "assets",
        "assets.extra",
        "onnx",
        "saved_model.pb",
        "tflite",
        "variables",
    ]
    assert (version / "assets.extra" / "config.yaml").read_text() == "name: taxi\n"
    assert "serving_default" in tf.saved_model.load(str(version)).signatures
    again = push(taxi, tmp_path / "again", tmp_path / "served")
    assert again.version == 1
    assert [p.name for p in (tmp_path / "served" / "taxi").iterdir()] == ["1"]


def test_push_keeps_a_rollback_and_forgets_the_oldest(taxi: StepRun, tmp_path: Path) -> None:
    base = tmp_path / "served" / "taxi"
    for number in (3, 8, 11):
        (base / str(number)).mkdir(parents=True)
        (base / str(number) / "saved_model.pb").write_bytes(b"another")
    result = push(taxi, tmp_path / "pushed", tmp_path / "served")
    assert (result.version, result.rollback_version) == (12, 11)
    assert sorted(p.name for p in base.iterdir()) == ["11", "12"]


def test_push_refuses_a_model_that_is_not_blessed(taxi: StepRun, tmp_path: Path) -> None:
    from components.config import EvaluateConfig

    strict = EvaluateConfig.model_validate({"thresholds": [{"metric": "auc", "min": 0.9999}]})
    taxi.call("evaluate", tmp_path / "evaluation", strict)
    with pytest.raises(NotBlessedError, match="failed: test auc"):
        push(taxi, tmp_path / "pushed", tmp_path / "served", evaluation=tmp_path / "evaluation")
    assert not (tmp_path / "served").exists()
    assert NotBlessedError.exit_code == 3


def test_push_refuses_a_proof_of_another_export(taxi: StepRun, tmp_path: Path) -> None:
    def change(path: Path) -> None:
        (path / "saved_model" / "assets.extra" / "labels.txt").write_text("yes\nno\n")

    exported = copy_of(taxi.path("exported"), tmp_path / "exported", "export", taxi, change)
    with pytest.raises(ArtifactError, match="The proof was made from another model than the one to push"):
        push(taxi, tmp_path / "pushed", tmp_path / "served", exported=exported)
    assert not (tmp_path / "served").exists()


def test_a_push_that_fails_in_the_middle_leaves_nothing_that_is_served(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copy2

    def fail_at_the_graph(source: Any, target: Any, **options: Any) -> Any:
        if str(target).endswith("saved_model.pb") and "served" in str(target):
            raise OSError(28, "No space left on device")
        return copied(source, target, **options)

    monkeypatch.setattr(shutil, "copy2", fail_at_the_graph)
    with pytest.raises(ArtifactError, match="No space left on the disk"):
        push(taxi, tmp_path / "pushed", tmp_path / "served")
    assert list((tmp_path / "served" / "taxi").iterdir()) == []
    assert not (tmp_path / "pushed").exists()
