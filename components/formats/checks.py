"""The check that every conversion ends with: converters report success and write broken files."""

from __future__ import annotations

import numpy as np

from components.errors import ArtifactError
from components.formats.errors import ConversionError
from components.formats.network import Arrays, Network
from components.formats.runners import ModelRunner

MAX_EXACT_DIFFERENCE = 1e-3
_NUM_EXAMPLES = 3
_FREE_SIZE = 5


def made_up_examples(network: Network) -> dict[str, np.ndarray]:
    """A few rows that fit the inputs: normal floats, and zeros for integers, which are valid as ids of anything."""
    rng = np.random.default_rng(0)
    examples = {}
    for name, spec in network.specs.items():
        shape = (_NUM_EXAMPLES, *(_FREE_SIZE if size is None else size for size in spec.shape[1:]))
        dtype = spec.dtype.as_numpy_dtype
        floating = spec.dtype.is_floating
        examples[name] = rng.normal(size=shape).astype(dtype) if floating else np.zeros(shape, dtype)
        if spec.dtype.name == "string":
            examples[name] = np.full(shape, "", object)
    return examples


def largest_difference(
    network: Network, runner: ModelRunner, form: str, examples: Arrays | None, *, exact: bool
) -> float:
    """Run a converted model and compare it with Keras.

    Of a form that is not exact, the caller judges whether the difference is small enough.

    Raises:
        ConversionError: it cannot run, answers something else, or answers with NaN.
    """
    examples = examples if examples is not None else made_up_examples(network)
    expected = network.expected(examples)
    try:
        answers = runner(examples)
    except ArtifactError as error:
        raise _broken(form, "the converted model", f"it does not run ({error})") from error
    largest = 0.0
    for name, wanted in expected.items():
        where = f"output '{name}'"
        if name not in answers:
            raise _broken(form, where, f"it is missing, there is {sorted(answers)}")
        got = answers[name]
        if got.shape != wanted.shape:
            raise _broken(form, where, f"it has shape {got.shape} instead of {wanted.shape}")
        if np.isfinite(wanted).all() and not np.isfinite(got).all():
            raise _broken(form, where, "it has NaN or infinite numbers")
        difference = float(np.abs(got.astype(np.float64) - wanted).max(initial=0.0))
        if exact and difference > MAX_EXACT_DIFFERENCE * max(1.0, float(np.abs(wanted).max(initial=0.0))):
            raise _broken(form, where, f"it differs from Keras by {difference:.2g}")
        largest = max(largest, difference)
    return largest


def _broken(form: str, where: str, why: str) -> ConversionError:
    return ConversionError(
        form,
        where=where,
        why=f"the converter reported success, but {why}",
        way_round="Leave this form out, and look for the layer that the converter changes with smaller models",
    )
