"""The settings of training-only augmentation: `train.augment`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.section import Fraction, Section

Pixels = Annotated[int, Field(ge=0)]


class Augment(Section):
    """Random changes of the images of a batch, each image its own; never in evaluation, export or serving."""

    flip: Literal["none", "horizontal", "vertical", "both"] = Field("none", description="Half of the images each way.")
    rotation_degrees: Annotated[float, Field(ge=0, le=180)] = Field(0.0, description="Up to so much, either way.")
    zoom: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="By a factor of 1 - zoom to 1 + zoom.")
    translation: Fraction = Field(0.0, description="Up to this share of height and width, each way.")
    crop_padding: Pixels = Field(
        0, description="Pad each side by so many pixels and crop the old size: a shift by whole pixels."
    )
    fill: Literal["constant", "reflect", "nearest"] = Field(
        "constant", description="What lies beyond the edges: black, the mirrored image, or its edge."
    )
    brightness: Fraction = Field(0.0, description="Add up to so much of the full scale, or take it away.")
    contrast: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Distance from the image's mean times 1 - contrast to 1 + contrast."
    )
    cutout: Pixels = Field(
        0, description="Side in pixels of a square, its centre anywhere, that becomes 0 (arXiv:1708.04552)."
    )
    erasing: Fraction = Field(
        0.0, description="Probability that a rectangle of 2 to 33 % of the image becomes 0 (arXiv:1708.04896)."
    )

    @model_validator(mode="after")
    def _fill_has_a_reader(self) -> Augment:
        if self.fill != "constant" and not self.moves:
            raise ValueError(
                "nothing reads fill without rotation_degrees, zoom, translation or crop_padding: leave out 'fill', "
                f"received {self.fill!r}"
            )
        return self

    @property
    def moves(self) -> bool:
        """Whether pixels come in from beyond the edges."""
        return bool(self.rotation_degrees or self.zoom or self.translation or self.crop_padding)
