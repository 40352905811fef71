"""What can go wrong in a conversion."""

from __future__ import annotations

import re

from components.errors import HeadraceError


class ConversionError(HeadraceError):
    """A model cannot take a form.

    Attributes:
        format: The form, such as `tflite_int8` or `onnx`.
        where: The operation, the layer or the input at fault.
        why: What the form or its converter cannot do.
        way_round: What to change.
    """

    def __init__(self, format: str, *, where: str, why: str, way_round: str) -> None:
        super().__init__(f"{format} cannot take this model: {where}: {why.rstrip('.')}. {way_round.rstrip('.')}.")
        self.format, self.where, self.why, self.way_round = format, where, why, way_round


def first_line(error: BaseException, length: int = 300) -> str:
    """The message of an error in one line of at most `length` characters."""
    return re.sub(r"\s+", " ", str(error)).strip()[:length]
