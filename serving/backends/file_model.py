"""What LiteRT and ONNX files have in common as served models: the file tells names, types and shapes; one call runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serving.backends.signatures import Signature, SignatureModel, TensorSpec
from serving.errors import invalid_argument

Specs = Mapping[str, TensorSpec]


class FileModel(SignatureModel):
    """A model in one file.

    Shapes are checked here, for a runtime would resize what has a fixed size, or fail without a word that helps. A file
    that was converted for one example is called for each example of a batch.

    Args:
        specs: signature name -> its inputs and its outputs, by alias.
        note: what a client should know whose inputs do not fit, for the end of the message.
    """

    def __init__(self, specs: Mapping[str, tuple[Specs, Specs]], note: str = "") -> None:
        super().__init__({name: Signature.from_specs(name, *sides) for name, sides in specs.items()}, note)
        self._specs = specs
        self._one_by_one = {name for name, sides in specs.items() if all(map(_holds_one_example, sides))}

    def _execute(self, signature: Signature, feeds: dict[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        one_by_one = signature.name in self._one_by_one
        for alias, spec in self._specs[signature.name][0].items():
            self._check_shape(alias, feeds[alias].shape, spec.shape, one_by_one)
        sizes = {len(array) for array in feeds.values()} if one_by_one else {1}
        if sizes == {1}:
            return self._call(signature.name, feeds, outputs)
        if len(sizes) > 1:
            raise invalid_argument(f"the inputs hold batches of different sizes: {sorted(sizes)}")
        rows = [
            self._call(signature.name, {alias: array[row : row + 1] for alias, array in feeds.items()}, outputs)
            for row in range(sizes.pop())
        ]
        return [np.concatenate(column) for column in zip(*rows, strict=True)]

    def _check_shape(self, alias: str, shape: tuple[int, ...], expected: tuple[int, ...], is_batch_free: bool) -> None:
        fits = len(shape) == len(expected) and all(
            size == wanted or wanted < 0 or (is_batch_free and axis == 0)
            for axis, (size, wanted) in enumerate(zip(shape, expected, strict=True))
        )
        if not fits:
            raise invalid_argument(f"input {alias} must have shape {list(expected)}, got {list(shape)}{self._note}")
        if 0 in shape:
            raise invalid_argument(f"input {alias} has shape {list(shape)}, which holds nothing")

    def _call(self, name: str, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        """The values of `outputs`, in order, of one run of a signature."""
        raise NotImplementedError


def _holds_one_example(specs: Specs) -> bool:
    return bool(specs) and all(spec.shape[:1] == (1,) for spec in specs.values())
