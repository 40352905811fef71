"""Calibration, equalization, bias correction and sensitivity, each on its own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from components.errors import DataError
from components.formats import ConversionError
from components.ptq import Simulation
from components.ptq.bias_correction import correct_biases
from components.ptq.equalization import equalize, find_pairs
from components.ptq.sensitivity import keep_float, measure, units
from components.ptq.simulation import sqnr_db
from models.hooks import features
from models.quantization import FakeQuantize, QuantizedLayer, ranges
from tests.components.ptq.conftest import CALIBRATION, HELD_OUT, IMAGES, small_network, spread


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    """Calibrated to minima and maxima; no test changes its weights."""
    made = Simulation(small_network())
    made.set_ranges({name: (h.low, h.high) for name, h in made.histograms(CALIBRATION).items()})
    return made


# Simulation


def test_switched_off_it_answers_as_the_model(simulation: Simulation, model: keras.Model) -> None:
    simulation.switch(())
    np.testing.assert_allclose(simulation.answers(HELD_OUT)[0], model.predict(IMAGES[128:], verbose=0), atol=1e-5)


def test_switched_on_it_answers_as_the_quantization_aware_model(simulation: Simulation) -> None:
    simulation.switch()
    expected = simulation.aware(HELD_OUT["image"], training=False)
    np.testing.assert_allclose(simulation.answers(HELD_OUT)[0], expected, atol=1e-5)
    simulation.switch(())
    assert np.abs(simulation.answers(HELD_OUT)[0] - expected).max() > 1e-3


def test_histograms_are_those_of_the_float_activations(simulation: Simulation, model: keras.Model) -> None:
    found = simulation.histograms(CALIBRATION)
    outputs = features(model, ["first_relu", "third", "add"])(IMAGES[:128])
    for name, values in outputs.items():
        values = np.asarray(values)
        histogram = found[f"{name}_range"]
        np.testing.assert_allclose((histogram.low, histogram.high), (min(values.min(), 0), values.max()), rtol=1e-5)
        expected, _ = np.histogram(values[values != 0], histogram.edges)
        assert histogram.counts.sum() == expected.sum()
        assert np.abs(histogram.counts - expected).sum() < 0.002 * expected.sum()
    assert set(found) == {q.name for q in simulation.layers if isinstance(q, FakeQuantize)}


def test_activations_that_are_not_finite_are_refused(simulation: Simulation) -> None:
    images = IMAGES[:8].copy()
    images[3, 1, 1, 0] = np.inf
    with pytest.raises(DataError, match=r"what 'image_range' rounds is from .* to inf"):
        simulation.histograms({"image": images})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            layers.GRU(3, name="gru"),
            "layer 'gru': it is not known how GRU is quantized. Give the layer a quantization_spec",
        ),
        (layers.LayerNormalization(), "model 'plain': no layer of it has an int8 form"),
        (
            layers.Dense(3, kernel_constraint="max_norm"),
            "model 'plain': layer 'dense.*' has a constraint on its kernel",
        ),
    ],
    ids=["unknown", "float", "refused"],
)
def test_models_that_would_stay_float_are_refused(layer: keras.Layer, message: str) -> None:
    rows = keras.Input((5, 4), name="rows")
    with pytest.raises(ConversionError, match=message):
        Simulation(keras.Model(rows, layer(rows), name="plain"))


def test_sqnr_is_ten_decibels_for_each_tenfold_power() -> None:
    signal = np.array([[3.0, -4.0]])
    assert sqnr_db([signal], [signal + 0.5]) == pytest.approx(10 * np.log10(12.5 / 0.25))
    assert sqnr_db([signal, signal * 9], [signal + 0.5, signal * 9]) == pytest.approx(10 * np.log10(12.5 / 0.125))


# Equalization


def test_pairs_are_layers_between_which_factors_pass(simulation: Simulation) -> None:
    names = [(first.name, second.name) for first, second in find_pairs(simulation.aware)]
    # The output of `third` is also added, and that of `fourth` meets it.
    assert names == [("first", "second"), ("second", "third")]


def test_equalization_keeps_the_function_and_evens_the_ranges() -> None:
    simulation = Simulation(spread(small_network()))
    before = simulation.answers(HELD_OUT)[0]
    pairs = find_pairs(simulation.aware)
    equalize(pairs)
    np.testing.assert_allclose(simulation.answers(HELD_OUT)[0], before, rtol=1e-3, atol=1e-4)
    first, second = pairs[0]
    given = np.abs(first.folded()[0]).max((0, 1, 2))
    taken = np.abs(second.layer.kernel).max((0, 1, 3))
    np.testing.assert_allclose(given, taken, rtol=0.05)


# Bias correction


@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_bias_correction_takes_back_the_shift_of_the_mean(activation: str) -> None:
    """One large weight makes the scale of each channel, and the small ones vanish: what they add is missing."""
    image = keras.Input((8, 8, 3), name="image")
    model = keras.Model(image, layers.Conv2D(2, 3, activation=activation, name="conv")(image))
    images = {"image": np.abs(IMAGES)}
    kernel = np.full((3, 3, 3, 2), 0.0035, "float32")
    kernel[0, 0, 0] = 1
    bias = np.full(2, -images["image"].mean(), "float32")  # so that a ReLU cuts half
    model.set_weights([kernel, bias])
    simulation = Simulation(model)
    simulation.set_ranges({name: (h.low, h.high) for name, h in simulation.histograms(images).items()})
    assert correct_biases(simulation, images) == 1
    missing = 26 * 0.0035 * images["image"].mean()
    np.testing.assert_allclose(simulation.aware.get_layer("conv").layer.bias - bias, missing, rtol=0.15)


def test_bias_correction_goes_on_from_the_corrected_inputs() -> None:
    """All layers in one pass: the mean of the last one's output is right though those before it have changed."""
    simulation = Simulation(small_network())
    wanted = simulation.answers(CALIBRATION)[0].mean(0)
    share = {"logits_range": 1.0}
    simulation.set_ranges(
        {
            n: (share.get(n, 0.6) * h.low, share.get(n, 0.6) * h.high)
            for n, h in simulation.histograms(CALIBRATION).items()
        }
    )
    simulation.switch()
    before = np.abs(simulation.answers(CALIBRATION)[0].mean(0) - wanted).max()
    correct_biases(simulation, CALIBRATION)
    simulation.switch()
    after = np.abs(simulation.answers(CALIBRATION)[0].mean(0) - wanted).max()
    assert after < 0.1 * before


# Sensitivity


def test_units_are_what_rounds_for_an_operation(simulation: Simulation) -> None:
    found = {unit.name: unit.members for unit in units(simulation)}
    assert list(found) == ["first", "second", "third", "third_relu", "fourth", "add", "pool", "logits"]
    assert found["first"] == {"image_range", "first", "first_relu_range"}
    assert found["add"] == {"fourth_range", "third_range", "add_range"}
    assert set().union(*found.values()) == {layer.name for layer in simulation.layers}


def test_the_layer_that_was_harmed_comes_first_and_no_layer_costs_a_trace() -> None:
    model = small_network()
    fourth = model.get_layer("fourth")
    kernel = fourth.kernel.numpy()
    kernel[0, 0, 0] = 60  # of an input channel that says next to nothing
    fourth.kernel.assign(kernel)
    third = model.get_layer("third")
    weights, bias = third.get_weights()
    weights[..., 0], bias[0] = 1e-5, 0
    third.set_weights([weights, bias])
    simulation = Simulation(model)
    reference = simulation.answers(HELD_OUT)
    simulation.set_ranges({name: (h.low, h.high) for name, h in simulation.histograms(CALIBRATION).items()})
    rows = measure(simulation, HELD_OUT, reference, lambda answers: float(np.abs(answers[0] - reference[0]).max()))
    assert rows[0].layer == "fourth"
    assert rows[0].sqnr_db < rows[1].sqnr_db - 10
    assert [row.sqnr_db for row in rows] == sorted(row.sqnr_db for row in rows)
    assert rows[0].drop is not None
    assert rows[0].drop > 0.01
    assert simulation._answer.experimental_get_tracing_count() == 1


def test_float_layers_free_what_only_they_round(simulation: Simulation) -> None:
    assert keep_float(simulation, ["fourth"]) == {"fourth"}
    freed = keep_float(simulation, ["fourth", "third_relu"])
    assert freed == {"fourth", "third_relu_range"}
    assert {layer.name for layer in simulation.layers if not layer.is_active()} == freed
    assert not keep_float(simulation, [])
    assert len(ranges(simulation.aware)) == sum(not isinstance(layer, QuantizedLayer) for layer in simulation.layers)
