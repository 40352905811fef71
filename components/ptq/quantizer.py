"""Post-training quantization of a Keras model, from calibration to the model that converters take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import keras

from components.config import CompressConfig
from components.errors import HeadraceError
from components.formats.network import Arrays
from components.ptq.bias_correction import correct_biases
from components.ptq.equalization import Pair, equalize, find_pairs
from components.ptq.finetuning import finetune
from components.ptq.histograms import Histogram, range_of
from components.ptq.sensitivity import Drop, Sensitivity, keep_float, measure
from components.ptq.simulation import Simulation, sqnr_db
from models.quantization import ranges, strip


@dataclass(frozen=True)
class Quantized:
    """A model with int8 ranges.

    Attributes:
        model: For `convert_tflite(form="int8")` and `convert_onnx(form="static_int8")`, which need no calibration then.
        sqnr_db: Signal-to-quantization-noise ratio of its answers to the validation examples, in decibels.
        drop: What the metric loses there; None where none was given.
        ranges: Of each activation: `layer`, `tensor`, `min`, `max`, `method`, and `observed_min`, `observed_max`.
        tried: Of each change of the weights: `change`, `sqnr_db_before`, `sqnr_db_after`, `kept`.
        sensitivity: Of each layer, the worst first.
        float_layers: What was left in float.
    """

    model: keras.Model
    sqnr_db: float
    drop: float | None
    ranges: list[dict[str, Any]]
    tried: list[dict[str, Any]]
    sensitivity: list[Sensitivity]
    float_layers: list[str]

    def to_json(self) -> dict[str, Any]:
        """All but the model, as JSON-able values."""
        fields = {name: value for name, value in vars(self).items() if name != "model"}
        return {**fields, "sensitivity": [asdict(row) for row in self.sensitivity]}


def quantize(
    model: keras.Model,
    *,
    calibration: Arrays,
    validation: Arrays,
    config: CompressConfig,
    drop: Drop | None = None,
) -> Quantized:
    """Give a trained model the ranges of an int8 one, and its weights what makes up for the rounding.

    Cross-layer equalization, bias correction and fine-tuning are tried in this order, and each is kept only if the
    answers to the validation examples come nearer to the float model's.

    Args:
        model: A built model that `quantize_aware` takes; it stays as it is.
        calibration: Name -> examples of the training split `(num_examples, ...)`, by which ranges are set.
        validation: Held-out examples, by which it is judged what helps.
        config: Calibration and what comes after it.
        drop: What a metric loses by these outputs for the validation examples; `mixed.max_drop` needs it.

    Raises:
        ConversionError: `quantize_aware` cannot take the model, or leaves layers with kernels in float.
        HeadraceError: there are not finite activations, or `mixed.max_drop` is reached by no model with an int8 layer.

    Example:
        >>> quantized = quantize(model, calibration=images, validation=held_out, config=CompressConfig())
        >>> network = Network.of(quantized.model, outputs=["logits"])
        >>> convert_tflite(network, Path("model.tflite"), form="int8")
    """
    return _Quantizer(model, calibration, validation, config, drop).run()


class _Quantizer:
    def __init__(
        self, model: keras.Model, calibration: Arrays, validation: Arrays, config: CompressConfig, drop: Drop | None
    ) -> None:
        self.calibration, self.validation, self.config, self.drop = calibration, validation, config, drop
        self.simulation = Simulation(model)
        self.simulation.switch(())
        self.reference = self.simulation.answers(validation)
        self.targets = self.simulation.answers(calibration) if config.finetune_steps else []
        self.histograms: dict[str, Histogram] = {}
        self.tried: list[dict[str, Any]] = []

    def run(self) -> Quantized:
        """Every stage in its order."""
        self._calibrate()
        config, simulation = self.config, self.simulation
        if config.equalize and (pairs := find_pairs(simulation.aware)):
            self._try("equalize", lambda: self._equalize(pairs))
        if config.correct_bias:
            self._try("correct_bias", lambda: correct_biases(simulation, self.calibration))
        if config.finetune_steps:
            self._try("finetune", self._finetune)
        simulation.switch()
        sensitivity = []
        if config.sensitivity or config.mixed is not None:
            sensitivity = measure(simulation, self.validation, self.reference, self.drop)
        float_layers = self._choose_float(sensitivity)
        unrounded = keep_float(simulation, float_layers)
        answers = simulation.answers(self.validation)
        return Quantized(
            model=strip(simulation.aware, keep_float=unrounded),
            sqnr_db=sqnr_db(self.reference, answers),
            drop=self.drop and self.drop(answers),
            ranges=self._ranges(unrounded),
            tried=self.tried,
            sensitivity=sensitivity,
            float_layers=float_layers,
        )

    def _calibrate(self) -> None:
        calibration = self.config.calibration
        self.histograms = self.simulation.histograms(self.calibration)
        found = {n: range_of(h, calibration.method, calibration.percentile) for n, h in self.histograms.items()}
        self.simulation.set_ranges(found)

    def _equalize(self, pairs: list[Pair]) -> None:
        equalize(pairs)
        self._calibrate()

    def _try(self, name: str, change: Callable[[], Any]) -> None:
        """Change the model, and back if its answers are no better for it."""
        weights, histograms, before = self.simulation.aware.get_weights(), self.histograms, self._sqnr_db()
        change()
        after = self._sqnr_db()
        if not after > before:
            self.simulation.aware.set_weights(weights)
            self.histograms = histograms
        self.tried.append({"change": name, "sqnr_db_before": before, "sqnr_db_after": after, "kept": after > before})

    def _sqnr_db(self) -> float:
        self.simulation.switch()
        return sqnr_db(self.reference, self.simulation.answers(self.validation))

    def _finetune(self) -> None:
        finetune(
            self.simulation,
            self.calibration,
            self.targets,
            num_steps=self.config.finetune_steps,
            learning_rate=self.config.finetune_learning_rate,
            seed=self.config.seed,
        )

    def _choose_float(self, sensitivity: list[Sensitivity]) -> list[str]:
        """The most sensitive layers, as many as `mixed` asks for."""
        mixed, worst = self.config.mixed, [row.layer for row in sensitivity]
        if mixed is None:
            return []
        if mixed.max_drop is None:
            return worst[: mixed.keep_float]
        if self.drop is None:
            raise TypeError("mixed.max_drop needs drop, which tells what the metric loses")
        drops = []
        for count in range(len(worst)):
            keep_float(self.simulation, worst[:count])
            drops.append(self.drop(self.simulation.answers(self.validation)))
            if drops[-1] <= mixed.max_drop:
                return worst[:count]
        raise HeadraceError(
            f"compress.mixed.max_drop: with one layer in int8 the metric still falls by {drops[-1]:.4f}, and by "
            f"{min(drops):.4f} at least, where {mixed.max_drop} is allowed. Allow more, or leave int8 out."
        )

    def _ranges(self, unrounded: set[str]) -> list[dict[str, Any]]:
        rows = []
        for tensor, (low, high) in ranges(self.simulation.aware).items():
            if tensor not in unrounded:
                observed = self.histograms.get(tensor)
                row = {"layer": tensor.removesuffix("_range"), "tensor": tensor, "min": low, "max": high}
                if observed is None:
                    rows.append({**row, "method": "fixed"})
                else:
                    method = self.config.calibration.method
                    rows.append({**row, "method": method, "observed_min": observed.low, "observed_max": observed.high})
        return rows
