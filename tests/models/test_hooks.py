from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from models import hooks
from models.resnet import build
from models.spec import FeatureSpec, OutputSpec

X = np.array([[1.0, 2.0], [3.0, -4.0]], np.float32)


class Times(layers.Layer):
    """Multiplies by a number."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


class Block(layers.Layer):
    """A layer with layers inside, one of which it calls twice; gives a dictionary."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.twice, self.ten = Times(2.0, name="twice"), Times(10.0, name="ten")

    def call(self, inputs: Any) -> dict[str, Any]:
        return {"four": self.twice(self.twice(inputs)), "ten": self.ten(inputs)}


class Net(keras.Model):
    """Subclassed: the block, and a functional submodel on a part of its outputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block, self.head = Block(name="block"), functional(name="head")

    def call(self, inputs: Any) -> Any:
        return self.head(self.block(inputs)["four"])


def functional(name: str = "net") -> keras.Model:
    """x -> 3x -> |3x| -> 3|3x| with one layer called twice and an operation that is no layer between the calls."""
    inputs = keras.Input((2,), name="x")
    thrice = Times(3.0, name="thrice")
    absolute = ops.absolute(thrice(inputs))
    return keras.Model(inputs, layers.ReLU(name="relu")(thrice(absolute)), name=name)


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), Times(2.0, name="a"), Times(5.0, name="b")], name="stack")


def built(model: keras.Model) -> keras.Model:
    model(X)
    return model


def seen_by(model: keras.Model, patterns: list[str], call: Any = None) -> list[tuple[str, Any]]:
    """Path and output of each layer as numbers, in order."""
    seen: list[tuple[str, Any]] = []
    with hooks.observing(model, patterns, lambda path, output: seen.append((path, output))):
        (call or model)(X)
    return [(path, tf.nest.map_structure(np.asarray, output)) for path, output in seen]


def assert_seen(actual: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> None:
    assert [path for path, _ in actual] == [path for path, _ in expected]
    for (_, output), (_, wanted) in zip(actual, expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, output, wanted)


ABSOLUTE = [("thrice", 3 * X), ("absolute", 3 * abs(X)), ("thrice", 9 * abs(X)), ("relu", 9 * abs(X))]


@pytest.mark.parametrize("training", [False, True])
def test_functional_with_a_shared_layer_and_an_operation(training):
    model = functional()
    model.operations[2].name = "absolute"  # Keras numbers it by how many there were before.
    assert_seen(seen_by(model, ["*"], lambda x: model(x, training=training)), ABSOLUTE)


def test_sequential():
    assert_seen(seen_by(sequential(), ["b", "a"]), [("a", 2 * X), ("b", 10 * X)])


def test_subclassed_with_what_is_nested():
    expected = [
        ("block/twice", 2 * X),
        ("block/twice", 4 * X),
        ("block/ten", 10 * X),
        ("block", {"four": 4 * X, "ten": 10 * X}),
        ("head/thrice", 12 * X),
        ("head/thrice", 36 * abs(X)),
        ("head/relu", 36 * abs(X)),
        ("head", 36 * abs(X)),
    ]
    model = built(Net())
    assert_seen([each for each in seen_by(model, ["*"]) if "absolute" not in each[0]], expected)


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        (["twice"], ["block/twice"]),
        (["t*"], ["block/twice", "block/ten", "head/thrice"]),
        (["block"], ["block"]),
        (["block/*"], ["block/twice", "block/ten"]),
        (["head/[rt]*", "block"], ["block", "head/thrice", "head/relu"]),
        (["*/ten", "ten"], ["block/ten"]),
    ],
)
def test_patterns(patterns, paths):
    assert [path for path, _ in hooks.find(built(Net()), patterns)] == paths


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["twise"], "no layer of model 'net' matches 'twise': did you mean 'twice'"),
        (["twice", "block/tem"], "matches 'block/tem': did you mean 'block/ten'"),
        (["zzz*"], "matches 'zzz[*]': its layers are block, twice, ten, head, thrice, absolute[_0-9]*, relu$"),
        ([], r"list of names of layers such as \['block\*'\], received \[\]"),
        ("block", "received 'block'"),
    ],
)
def test_patterns_that_are_wrong(patterns, message):
    with pytest.raises(ValueError, match=message):
        hooks.find(built(Net(name="net")), patterns)


def test_a_layer_in_several_places_is_reported_once_a_call():
    shared = Times(2.0, name="shared")
    left, right = (keras.Sequential([keras.Input((2,)), shared], name=name) for name in ("left", "right"))
    inputs = keras.Input((2,))
    model = keras.Model(inputs, right(left(inputs)))
    assert_seen(seen_by(model, ["right/shared"]), [("right/shared", 2 * X), ("right/shared", 4 * X)])
    assert [path for path, _ in hooks.find(model, ["shared"])] == ["left/shared"]


def test_layers_that_hold_each_other():
    """A child that knows its parent: the search ends, and finds both."""
    model = Net()
    model.block.twice.parent = model.block
    assert [path for path, _ in hooks.find(model, ["*twice", "block"])] == ["block", "block/twice"]


def test_inputs_as_they_reach_the_layer():
    """Tensors only, in the compute dtype, before the outputs."""
    model = keras.Sequential([keras.Input((2,)), layers.Dropout(0.5, name="drop", dtype="float16")])
    events: list[Any] = []
    with hooks.observing(
        model,
        ["*"],
        lambda path, output: events.append(("after", path)),
        before=lambda path, inputs: events.append(("before", path, [tensor.dtype for tensor in inputs])),
    ):
        model(X, training=False)
    assert events == [("before", "drop", [tf.float16]), ("after", "drop")]


def test_in_a_traced_function():
    """It becomes a part of the graph that is traced in the context, and of no other."""
    model, sums = built(Net()), tf.Variable(0.0)

    def add(path: str, output: Any) -> None:
        sums.assign_add(ops.sum(output))

    before, within = tf.function(model), tf.function(model)
    before(X)
    with hooks.observing(model, ["block/twice"], add):
        before(X)
        assert sums.numpy() == 0
        result = within(X)
    np.testing.assert_array_equal(result, 36 * abs(X))
    assert sums.numpy() == X.sum() * (2 + 4)
    within(X)
    assert sums.numpy() == X.sum() * (2 + 4) * 2


def test_under_xla():
    model = functional()

    def compute(x: Any) -> list[Any]:
        outputs: list[Any] = []
        with hooks.observing(model, ["thrice"], lambda path, output: outputs.append(output)):
            model(x)
        return outputs

    first, second = tf.function(compute, jit_compile=True)(X)
    np.testing.assert_array_equal(first, 3 * X)
    np.testing.assert_array_equal(second, 9 * abs(X))


def test_inference_of_shapes_is_no_call():
    """A layer without `build` is run on symbolic tensors by Keras, to build what is inside."""
    block = Block(name="block")
    model = keras.Sequential([block])
    assert [path for path, _ in seen_by(model, ["*"])] == ["block/twice", "block/twice", "block/ten", "block"]
    seen: list[str] = []
    with hooks.observing(model, ["*"], lambda path, output: seen.append(path)):
        model(keras.Input((2,)))
    assert seen == []


@pytest.mark.parametrize("nested", [False, True])
def test_everything_is_undone_after_an_error(nested):
    model = built(Net())
    parts = [layer for _, layer in hooks.find(model, ["*"])]
    before = [dict(vars(layer)) for layer in parts]
    fail = RuntimeError("no further")

    def stop(path: str, output: Any) -> None:
        raise fail

    with pytest.raises(RuntimeError, match="no further"), hooks.observing(model, ["*"], stop):
        if nested:
            with hooks.observing(model, ["ten"], stop):
                model(X)
        model(X)
    assert [vars(layer).keys() for layer in parts] == [each.keys() for each in before]
    assert all("call" not in vars(layer) for layer in parts)
    np.testing.assert_array_equal(model(X), 36 * abs(X))


def test_contexts_within_each_other():
    model, seen = sequential(), []
    with hooks.observing(model, ["a"], lambda path, _: seen.append("outer")):
        with hooks.observing(model, ["a"], lambda path, _: seen.append("inner")):
            model(X)
        model(X)
    model(X)
    assert seen == ["outer", "inner", "outer"]


def test_a_wrong_pattern_hooks_nothing():
    model = sequential()
    with pytest.raises(ValueError, match="matches 'c'"), hooks.observing(model, ["a", "c"], print):
        pass
    assert "call" not in vars(model.layers[0])


def test_quantized_layer():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="dense")])
    model.layers[0].quantize("int8")
    np.testing.assert_array_equal(seen_by(model, ["dense"])[0][1], model(X))


def test_features_of_a_graph_are_a_functional_model():
    inputs = {"image": FeatureSpec((8, 8, 1), "float32")}
    model = build(inputs, OutputSpec("multiclass", 3), stage_sizes=(1, 1), stage_widths=(4, 8))
    batch = {"image": np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)}
    extractor = hooks.features(model, ["pool", "stage1_block1_add"])
    assert "logits" not in [layer.name for layer in extractor.layers]
    outputs = extractor.predict(batch, verbose=0)
    assert {path: value.shape for path, value in outputs.items()} == {"stage1_block1_add": (5, 8, 8, 4), "pool": (5, 8)}
    head = model.get_layer("logits")
    np.testing.assert_allclose(head(outputs["pool"]), model(batch), rtol=1e-5)


def test_features_of_a_graph_that_are_no_single_tensors():
    """A layer called twice, and one that gives a dictionary."""
    np.testing.assert_array_equal(hooks.features(functional(), ["thrice"])(X)["thrice:2"], 9 * abs(X))
    inputs = keras.Input((2,))
    model = keras.Model(inputs, Block(name="block")(inputs)["ten"])
    np.testing.assert_array_equal(hooks.features(model, ["block"])(X)["block"]["four"], 4 * X)


def test_features_of_a_sequential_model(tmp_path):
    extractor = hooks.features(sequential(), ["a"])
    extractor.save(tmp_path / "a.keras")
    loaded = keras.saving.load_model(tmp_path / "a.keras", custom_objects={"Times": Times})
    np.testing.assert_array_equal(loaded(X)["a"], 2 * X)


@pytest.mark.parametrize("call", ["eager", "predict", "function"])
def test_features_of_a_subclassed_model(call):
    extractor = hooks.features(built(Net()), ["block*", "block/*", "thrice"])
    outputs = {
        "eager": lambda: extractor(X),
        "predict": lambda: extractor.predict(X, batch_size=1, verbose=0),
        "function": lambda: tf.function(extractor)(X),
    }[call]()
    expected = {
        "block/twice": 2 * X,
        "block/twice:2": 4 * X,
        "block/ten": 10 * X,
        "block": {"four": 4 * X, "ten": 10 * X},
        "head/thrice": 12 * X,
        "head/thrice:2": 36 * abs(X),
    }
    assert outputs.keys() == expected.keys()
    tf.nest.map_structure(np.testing.assert_array_equal, dict(sorted(outputs.items())), dict(sorted(expected.items())))


def test_features_of_an_overridden_call():
    """A graph that the model's own `call` does not follow says nothing of what happens."""

    class Doubled(keras.Model):
        def call(self, inputs: Any, training: bool | None = None) -> Any:
            return super().call(2 * inputs, training=training)

    inputs = keras.Input((2,))
    model = Doubled(inputs, Times(5.0, name="five")(inputs))
    np.testing.assert_array_equal(hooks.features(model, ["five"])(X)["five"], 10 * X)


def test_features_leave_the_inputs_to_the_model():
    """Under a global policy of half precision, 70000 would be infinite."""
    model = built(Net(dtype="float32"))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        extractor = hooks.features(model, ["block/ten"])
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(extractor(np.float32([[70000.0, 1.0]]))["block/ten"], [[700000.0, 10.0]])
