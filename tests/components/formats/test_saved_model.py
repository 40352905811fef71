"""convert_saved_model: signatures, names, storage, and folders that need TensorFlow alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from components.errors import ArtifactError, HeadraceError
from components.formats import ConversionError, Network, convert_saved_model, load_runner
from serving.backends.saved_model import SavedModel
from tests.components.formats.models import CASES, Arrays, Case, several_case, strings_case, subclassed_case

KINDS = ["cat", "dog", "newt"]


def network_of(case: Case) -> Network:
    return Network.of(case.model, inputs=None if getattr(case.model, "inputs", None) else case.features)


def some(features: Arrays, count: int = 5) -> Arrays:
    return {name: values[:count] for name, values in features.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def graph_of(folder: Path) -> Any:
    return saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0]


def variables_bytes(folder: Path) -> int:
    return (folder / "variables" / "variables.data-00000-of-00001").stat().st_size


def example_of(features: Arrays, row: int) -> bytes:
    example = tf.train.Example()
    for name, values in features.items():
        value = np.ravel(values[row])
        feature = example.features.feature[name]
        if value.dtype == object:
            feature.bytes_list.value.extend(text.encode() for text in value)
        elif value.dtype == np.uint8:
            feature.bytes_list.value.append(value.tobytes())
        elif value.dtype.kind == "f":
            feature.float_list.value.extend(value)
        else:
            feature.int64_list.value.extend(value)
    return example.SerializeToString()


@pytest.fixture(scope="module")
def several() -> Case:
    return several_case()


@pytest.fixture(scope="module")
def pets(several: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two inputs and two outputs with every signature there is."""
    folder = tmp_path_factory.mktemp("pets") / "1"
    options: dict[str, Any] = {"classify": "kind", "classes": KINDS, "regress": "size", "features": ["conv", "hid*"]}
    convert_saved_model(
        network_of(several),
        folder,
        **options,
        others={"sums": lambda inputs: {"sum": tf.reduce_sum(inputs["extra"], axis=1)}},
        warmup=[some(several.features, 1), some(several.features, 3)],
    )
    return folder


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_keeps_its_numbers_and_its_names(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    network = network_of(case)
    conversion = convert_saved_model(network, tmp_path / "m", examples=case.features)
    assert (conversion.format, conversion.path) == ("saved_model", tmp_path / "m")
    assert conversion.max_abs_difference < 1e-5
    assert {info.name for info in conversion.inputs} == set(case.features)
    assert {info.shape[0] for info in conversion.inputs} == {None}
    assert conversion.size_bytes == sum(map(len, files_of(tmp_path / "m").values()))
    expected = network.expected(some(case.features, 1))
    got = load_runner(tmp_path / "m")(some(case.features, 1))
    assert got.keys() == expected.keys()
    for output, values in expected.items():
        np.testing.assert_allclose(got[output], values, atol=1e-5)


def test_a_free_length_stays_free_in_raw_and_serialized_inputs(tmp_path: Path) -> None:
    case = CASES["Transformer, dynamic length"]()
    network = network_of(case)
    convert_saved_model(network, tmp_path / "m")
    served = SavedModel(tmp_path / "m")
    for length in (3, 9):
        features = {"text": case.features["text"][:4, :length]}
        expected = network.expected(features)["logits"]
        np.testing.assert_allclose(served.run("serving_default", features)["logits"], expected, atol=1e-5)
        examples = np.array([example_of(features, row) for row in range(4)], object)
        got = served.run("serve_examples", {"examples": examples})["logits"]
        np.testing.assert_allclose(got, expected, atol=1e-5)
    # Of examples of different lengths the shorter are padded with 0, which is padding to the model.
    ragged = [{"text": case.features["text"][:1, :3]}, {"text": case.features["text"][1:2, :9]}]
    got = served.run("serve_examples", {"examples": np.array([example_of(each, 0) for each in ragged], object)})
    for row, features in enumerate(ragged):
        np.testing.assert_allclose(got["logits"][row], network.expected(features)["logits"][0], atol=1e-5)


def test_the_answers_of_all_signatures_agree(several: Case, pets: Path) -> None:
    served, features = SavedModel(pets), some(several.features)
    assert served.signatures.keys() - {"__saved_model_init_op"} == {
        "serving_default",
        "serve_examples",
        "classify",
        "regress",
        "features",
        "sums",
    }
    answers = served.run("serving_default", features)
    expected = network_of(several).expected(features)
    assert answers.keys() == {"kind", "size", "label"}
    for name in ("kind", "size"):
        np.testing.assert_allclose(answers[name], expected[name], atol=1e-6)
    best = [KINDS[i].encode() for i in expected["kind"].argmax(axis=1)]
    assert answers["label"].tolist() == best and len(set(best)) > 1
    examples = np.array([example_of(features, row) for row in range(5)], object)
    for name, values in served.run("serve_examples", {"examples": examples}).items():
        np.testing.assert_array_equal(values, answers[name])
    classified = served.run("classify", {"inputs": examples})
    assert classified["classes"].tolist() == [[kind.encode() for kind in KINDS]] * 5
    np.testing.assert_allclose(classified["scores"], answers["kind"], atol=1e-6)
    np.testing.assert_allclose(served.run("regress", {"inputs": examples})["outputs"], answers["size"], atol=1e-6)
    np.testing.assert_allclose(served.run("sums", features)["sum"], features["extra"].sum(axis=1), rtol=1e-6)


def test_classify_and_regress_are_what_tf_serving_looks_for(pets: Path) -> None:
    signatures = graph_of(pets).signature_def
    methods = {name: each.method_name.rpartition("/")[2] for name, each in signatures.items()}
    assert methods.pop("__saved_model_init_op") == ""
    assert methods == {
        "serving_default": "predict",
        "serve_examples": "predict",
        "classify": "classify",
        "regress": "regress",
        "features": "predict",
        "sums": "predict",
    }
    assert signatures["classify"].method_name == "tensorflow/serving/classify"
    for name, outputs in (("classify", {"classes": 7, "scores": 1}), ("regress", {"outputs": 1})):
        assert {key: (i.dtype, len(i.tensor_shape.dim)) for key, i in signatures[name].inputs.items()} == {
            "inputs": (tf.string.as_datatype_enum, 1)
        }
        assert {key: info.dtype for key, info in signatures[name].outputs.items()} == outputs
    assert [d.size for d in signatures["classify"].outputs["classes"].tensor_shape.dim] == [-1, 3]
    loaded = tf.saved_model.load(str(pets))
    assert set(loaded.signatures) == set(methods)


def test_features_are_the_outputs_of_the_layers(several: Case, pets: Path) -> None:
    features = some(several.features)
    got = SavedModel(pets).run("features", features)
    inner = keras.Model(several.model.input, {n: several.model.get_layer(n).output for n in ("conv", "hidden")})
    assert got.keys() == {"conv", "hidden"}
    for name, values in inner(features).items():
        np.testing.assert_allclose(got[name], values, atol=1e-6)


def test_features_of_a_layer_that_is_called_twice_and_within_another(tmp_path: Path) -> None:
    shared = layers.Dense(4, name="shared")
    block = keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="relu", name="inner")], name="block")
    x = keras.Input((4,), name="x")
    model = keras.Model(x, layers.Dense(2, name="y")(shared(block(shared(x)))))
    convert_saved_model(Network.of(model), tmp_path / "m", features=["shared", "block/*"])
    values = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    got = SavedModel(tmp_path / "m").run("features", {"x": values})
    first = shared(values)
    np.testing.assert_allclose(got["shared"], first, atol=1e-6)
    np.testing.assert_allclose(got["block/inner"], block(first), atol=1e-6)
    np.testing.assert_allclose(got["shared:2"], shared(block(first)), atol=1e-6)


def test_features_that_cannot_be(tmp_path: Path) -> None:
    network = network_of(CASES["GRU, masked"]())
    with pytest.raises(HeadraceError, match=r"features: no layer .* matches 'recurent': did you mean 'recurrent'\?"):
        convert_saved_model(network, tmp_path / "m", features=["recurent"])
    with pytest.raises(ConversionError, match=r"layer 'recurrent/gru_cell.*': it runs in a loop"):
        convert_saved_model(network, tmp_path / "m", features=["gru_cell"])
    assert list(tmp_path.iterdir()) == []


def test_a_binary_answer_of_one_probability_is_scored_for_both_classes(tmp_path: Path) -> None:
    case = strings_case()
    network = network_of(case)
    convert_saved_model(network, tmp_path / "m", classify="tip", classes=[0, 1])
    features, served = some(case.features), SavedModel(tmp_path / "m")
    tip = network.expected(features)["tip"]
    examples = np.array([example_of(features, row) for row in range(5)], object)
    classified = served.run("classify", {"inputs": examples})
    np.testing.assert_allclose(classified["scores"], np.concatenate([1 - tip, tip], axis=1), atol=1e-6)
    assert classified["classes"].tolist() == [[b"0", b"1"]] * 5
    label = served.run("serving_default", features)["label"]
    assert label.dtype.kind == "i" and label.tolist() == (tip[:, 0] > 0.5).astype(int).tolist()
    assert (tmp_path / "m" / "assets.extra" / "labels.txt").read_text() == "0\n1\n"


def test_bytes_of_images_in_examples(tmp_path: Path) -> None:
    image = keras.Input((4, 4, 1), name="image", dtype="uint8")
    x = layers.Flatten()(layers.Rescaling(1 / 255)(image))
    network = Network.of(keras.Model(image, layers.Dense(2, name="y")(x)))
    conversion = convert_saved_model(network, tmp_path / "m")
    features = {"image": np.random.default_rng(0).integers(0, 255, (3, 4, 4, 1), np.uint8)}
    examples = np.array([example_of(features, row) for row in range(3)], object)
    got = SavedModel(tmp_path / "m").run("serve_examples", {"examples": examples})["y"]
    np.testing.assert_allclose(got, network.expected(features)["y"], atol=1e-6)
    assert conversion.notes == ()


def test_an_input_of_several_free_sizes_has_no_signature_for_examples(tmp_path: Path) -> None:
    image = keras.Input((None, None, 3), name="image")
    network = Network.of(keras.Model(image, layers.GlobalAveragePooling2D(name="mean")(image)))
    conversion = convert_saved_model(network, tmp_path / "m", classify="mean", classes=KINDS)
    assert conversion.notes == ("no signatures for tf.Example, which cannot hold input 'image' with its free sizes",)
    assert set(tf.saved_model.load(str(tmp_path / "m")).signatures) == {"serving_default"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classify": "kid", "classes": KINDS}, r"classify: the model has no output 'kid'\. Did you mean 'kind'\?"),
        ({"regress": "length"}, r"regress: the model has no output 'length'\. Known: kind, size"),
        (
            {"classify": "kind", "classes": ["cat"]},
            r"output 'kind' must have a score for each of the 1 classes.*None, 3",
        ),
        ({"classes": KINDS}, "classes are the names of what `classify` scores: give both"),
        (
            {"regress": "kind"},
            r"regress: output 'kind' must have shape \(batch,\) or \(batch, 1\), received \(None, 3\)",
        ),
        ({"warmup": [{}] * 1001}, "at most 1000 warm-up requests, received 1001"),
        ({"warmup": [{"image": np.zeros((1, 8, 8, 1))}]}, "A warm-up request lacks input 'extra'"),
    ],
    ids=["classify", "regress", "classes", "unread", "shape", "warmup", "request"],
)
def test_options_that_do_not_fit(several: Case, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadraceError, match=message):
        convert_saved_model(network_of(several), tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


def test_warmup_requests_are_those_given_and_replay(several: Case, pets: Path) -> None:
    records = tf.data.TFRecordDataset(str(pets / "assets.extra" / "tf_serving_warmup_requests")).as_numpy_iterator()
    requests = [PredictionLog.FromString(record).predict_log.request for record in records]
    assert [request.model_spec.signature_name for request in requests] == ["serving_default"] * 2
    served = SavedModel(pets)
    for request, count in zip(requests, (1, 3), strict=True):
        inputs = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
        for name, values in inputs.items():
            np.testing.assert_array_equal(values, several.features[name][:count])
        assert len(served.run("serving_default", inputs)["label"]) == count


def wide_model() -> keras.Model:
    """Trained a step with dropout, so that there is what a SavedModel must not have."""
    keras.utils.set_random_seed(0)
    x = keras.Input((64,), name="x")
    y = layers.Dropout(0.5)(layers.Dense(256, activation="silu", name="wide")(x))
    model = keras.Model(x, layers.Dense(64, name="y")(layers.BatchNormalization(name="norm")(y)))
    model.compile("adam", "mse")
    model.fit(np.ones((4, 64), "float32"), np.ones((4, 64), "float32"), verbose=0)
    return model


def test_weights_are_stored_once_and_nothing_of_training(tmp_path: Path) -> None:
    model = wide_model()
    convert_saved_model(Network.of(model), tmp_path / "m", features=["wide"])
    weights = sum(weight.nbytes for weight in model.get_weights())
    assert weights <= variables_bytes(tmp_path / "m") < weights + 3_000
    stored = [name for name, _ in tf.train.list_variables(str(tmp_path / "m" / "variables" / "variables"))]
    assert len(stored) == len(model.weights) + 1  # and the graph of objects
    graph = graph_of(tmp_path / "m")
    functions = graph.graph_def.library.function
    ops = {node.op for node in graph.graph_def.node} | {node.op for each in functions for node in each.node_def}
    assert "MatMul" in ops
    assert not [op for op in ops if "Random" in op or "PyFunc" in op or "Grad" in op or "Adam" in op]
    assert not [
        each.signature.name for each in functions if "backward" in (name := each.signature.name) or "grad" in name
    ]
    assert sorted(files_of(tmp_path / "m")) == [
        "saved_model.pb",
        "variables/variables.data-00000-of-00001",
        "variables/variables.index",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_halves_the_file_and_answers_as_rounded_weights_do(dtype: str, tmp_path: Path) -> None:
    model = wide_model()
    network = Network.of(model)
    convert_saved_model(network, tmp_path / "float32")
    features = {"x": np.random.default_rng(0).normal(size=(5, 64)).astype("float32")}
    conversion = convert_saved_model(
        network, tmp_path / "half", weights_dtype=dtype, features=["wide"], examples=features
    )
    assert variables_bytes(tmp_path / "half") < 0.55 * variables_bytes(tmp_path / "float32")
    exact = network.expected(features)["y"]
    for weight in model.weights:
        if len(weight.shape) == 2:
            weight.assign(tf.cast(tf.cast(weight.value, dtype), tf.float32))
    rounded = network.expected(features)["y"]
    assert conversion.max_abs_difference == pytest.approx(np.abs(exact - rounded).max(), rel=1e-2) != 0
    # By the loader of TensorFlow and by that of TF Serving, which makes and casts variables its own way.
    hidden = model.get_layer("wide")(features["x"])
    for run in (load_runner(tmp_path / "half"), lambda x: SavedModel(tmp_path / "half").run("serving_default", x)):
        np.testing.assert_allclose(run(features)["y"], rounded, atol=1e-6)
    np.testing.assert_allclose(SavedModel(tmp_path / "half").run("features", features)["wide"], hidden, atol=1e-6)


def test_two_models_in_half_precision_do_not_share_weights(tmp_path: Path) -> None:
    features = {"x": np.ones((2, 64), "float32")}
    expected, runners = [], []
    for seed in (0, 1):
        keras.utils.set_random_seed(seed)
        network = Network.of(
            keras.Sequential([keras.Input((64,), name="x"), layers.Dense(64), layers.Dense(64, name="y")])
        )
        convert_saved_model(network, tmp_path / str(seed), weights_dtype="float16")
        expected.append(network.expected(features)["y"])
        runners.append(load_runner(tmp_path / str(seed)))
    for runner, wanted in zip(runners, expected, strict=True):
        np.testing.assert_allclose(runner(features)["y"], wanted, atol=1e-2)
    del runner, runners[0]
    gc.collect()
    np.testing.assert_allclose(runners[0](features)["y"], expected[1], atol=1e-2)


def test_a_weight_that_half_precision_cannot_hold_is_named(tmp_path: Path) -> None:
    model = wide_model()
    kernel = model.get_layer("wide").kernel
    kernel.assign(tf.tensor_scatter_nd_update(kernel.value, [[3, 7]], [70000.0]))
    with pytest.raises(ConversionError) as caught:
        convert_saved_model(Network.of(model), tmp_path / "m", weights_dtype="float16")
    assert str(caught.value) == (
        "saved_model cannot take this model: weight 'kernel' of layer 'wide': float16 ends at 65504, and it holds 70000. "
        "Store weights as float32 or bfloat16."
    )
    assert list(tmp_path.iterdir()) == []
    convert_saved_model(Network.of(model), tmp_path / "m", weights_dtype="bfloat16")


def test_small_weights_stay_float32(tmp_path: Path) -> None:
    network = Network.of(keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2, name="y")]))
    conversion = convert_saved_model(network, tmp_path / "m", weights_dtype="float16")
    assert conversion.notes == ("no weight is large enough to be stored in float16",)
    assert conversion.max_abs_difference < 1e-6


def test_an_output_called_as_the_label_is_refused(tmp_path: Path) -> None:
    network = Network.of(keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2, name="label")]))
    with pytest.raises(HeadraceError, match="The model has an output 'label', as the answer of `classify` is called"):
        convert_saved_model(network, tmp_path / "m", classify="label", classes=["a", "b"])


ALONE = """
import json, sys

sys.modules.update(dict.fromkeys(["components", "models", "pipelines", "serving"]))  # None: an import of them fails
import numpy as np, tensorflow as tf

# TensorFlow imports Keras itself: from here on there is none.
sys.modules.update(dict.fromkeys(["keras", *(name for name in sys.modules if name.startswith("keras."))]))
for folder in sys.argv[1:]:
    loaded = tf.saved_model.load(folder + "/m")
    arrays = dict(np.load(folder + "/arrays.npz"), **json.load(open(folder + "/texts.json")))
    answers = loaded.signatures["serving_default"](**{name: tf.constant(values) for name, values in arrays.items()})
    print(json.dumps({name: values.numpy().tolist() for name, values in answers.items()}))
"""


def test_it_loads_and_answers_with_tensorflow_alone(tmp_path: Path) -> None:
    cases = {name: CASES[name]() for name in ("tabular with strings", "subclassed, dictionary of outputs")}
    cases["half"] = Case(wide_model(), {"x": np.random.default_rng(0).normal(size=(5, 64)).astype("float32")})
    expected = []
    for name, case in cases.items():
        network, features, folder = network_of(case), some(case.features), tmp_path / name
        folder.mkdir()
        convert_saved_model(network, folder / "m", weights_dtype="bfloat16" if name == "half" else "float32")
        texts = {key: values.tolist() for key, values in features.items() if values.dtype == object}
        (folder / "texts.json").write_text(json.dumps(texts))
        np.savez(folder / "arrays.npz", **{key: values for key, values in features.items() if key not in texts})
        expected.append(network.expected(features))
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, wanted in zip(done.stdout.splitlines(), expected, strict=True):
        answers = json.loads(line)
        assert answers.keys() == wanted.keys()
        for output, values in wanted.items():
            np.testing.assert_allclose(answers[output], values, atol=0.05 if output == "y" else 1e-5)


MAKE = """
import sys
from pathlib import Path
from tests.components.formats.test_saved_model import make_some
make_some(Path(sys.argv[1]))
"""


def make_some(folder: Path) -> None:
    """SavedModels with what TensorFlow numbers through the process: functions, tables, loops, resources."""
    for name, dtype, layer in (("LSTM, masked", "float16", "logits"), ("tabular with strings", "float32", "tip")):
        case, target = CASES[name](), folder / name
        warmup = [some(case.features, 2)]
        convert_saved_model(network_of(case), target, weights_dtype=dtype, features=[layer], warmup=warmup)


def test_same_model_same_bytes_whatever_the_process_did_before(tmp_path: Path) -> None:
    make_some(tmp_path / "here")
    command = [sys.executable, "-c", MAKE, str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = files_of(tmp_path / "here"), files_of(tmp_path / "there")
    assert first.keys() == second.keys() and len(first) == 8
    assert [name for name in first if first[name] != second[name]] == []


def test_words_that_read_like_names_of_functions_are_kept(tmp_path: Path) -> None:
    words = ["__inference_call_77", "key_value_init12", "plain"]
    word = keras.Input((1,), dtype="string", name="word")
    model = keras.Model(word, layers.StringLookup(vocabulary=words, name="id")(word))
    convert_saved_model(Network.of(model), tmp_path / "m")
    features = {"word": np.array([[each] for each in [*words, "__inference_call_0"]], object)}
    assert load_runner(tmp_path / "m")(features)["id"].ravel().tolist() == [1, 2, 3, 0]


def test_a_model_that_calls_python_is_refused(tmp_path: Path) -> None:
    class Logarithm(layers.Layer):
        def call(self, inputs: Any) -> Any:
            outputs = tf.numpy_function(np.log1p, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return outputs

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    x = keras.Input((2,), name="x")
    model = keras.Model(x, Logarithm(name="logarithm")(x))
    with pytest.raises(ConversionError, match=r"operation (Eager)?PyFunc\w* of layer 'logarithm': it calls Python"):
        convert_saved_model(Network.of(model), tmp_path / "m")


def test_tables_of_ones_own_layers_are_found(tmp_path: Path) -> None:
    class Codes(layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([4.0, 9.0]))
            self.codes = tf.lookup.StaticHashTable(pairs, -1.0)

        def call(self, inputs: Any) -> Any:
            return self.codes.lookup(inputs)

        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor(inputs.shape, "float32")

    word = keras.Input((1,), dtype="string", name="word")
    convert_saved_model(Network.of(keras.Model(word, Codes(name="codes")(word))), tmp_path / "m")
    got = load_runner(tmp_path / "m")({"word": np.array([["b"], ["?"]], object)})
    assert got["codes"].tolist() == [[9.0], [-1.0]]


def test_nothing_is_overwritten_and_nothing_half_done_stays(
    several: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(HeadraceError, match="m is there already: delete it, or name another folder"):
        convert_saved_model(network_of(several), tmp_path / "m")
    assert files_of(tmp_path) == {"m/notes.txt": b"mine"}
    save = tf.saved_model.save

    def fail(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        convert_saved_model(network_of(several), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_that_is_saved_wrongly_is_not_written(
    several: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(several)
    monkeypatch.setattr(network, "expected", lambda features: {"kind": np.zeros((3, 3)), "size": np.zeros((3, 1))})
    with pytest.raises(
        ConversionError, match="output 'kind': the converter reported success, but it differs from Keras"
    ):
        convert_saved_model(network, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no graph": lambda path: (path / "saved_model.pb").unlink(),
    "cut graph": lambda path: _cut(path / "saved_model.pb"),
    "noise": lambda path: (path / "saved_model.pb").write_bytes(np.random.default_rng(0).bytes(4000)),
    "empty graph": lambda path: (path / "saved_model.pb").write_bytes(b""),
    "no variables": lambda path: (path / "variables" / "variables.data-00000-of-00001").unlink(),
    "no index": lambda path: (path / "variables" / "variables.index").unlink(),
    "cut variables": lambda path: _cut(path / "variables" / "variables.data-00000-of-00001"),
    "changed variables": lambda path: _flip(path / "variables" / "variables.data-00000-of-00001"),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40] ^= 0xFF
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(damage: str, tmp_path: Path) -> None:
    case = subclassed_case()
    convert_saved_model(network_of(case), tmp_path / "m")
    DAMAGES[damage](tmp_path / "m")
    with pytest.raises(ArtifactError, match=r"Cannot load the SavedModel .*/m: "):
        load_runner(tmp_path / "m")
