"""The parts of a schema, and what may not stand together in one."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.config import Fraction, Section

Environment = Literal["training", "serving"]
NonNegative = Annotated[int, Field(ge=0)]
# As in TFDV: features in these stages of their life are not checked.
_UNCHECKED = ("planned", "alpha", "debug", "deprecated")


class Comparator(Section):
    """The largest distance from other data, by measure. Each that is given is checked."""

    l_infinity: Fraction | None = Field(None, description="int, string: largest change of one value's share.")
    jensen_shannon: Fraction | None = Field(None, description="int, float, string: divergence, base 2.")
    normalized_difference: Fraction | None = Field(
        None, description="int, string: largest change of one value's count, as a share of all rows of both."
    )

    @property
    def thresholds(self) -> dict[str, float]:
        """Measure -> threshold, of those given."""
        measures = ("l_infinity", "jensen_shannon", "normalized_difference")
        return {name: value for name in measures if (value := getattr(self, name)) is not None}


class BoolDomain(Section):
    """A truth value: 0 and 1 in numbers, these two texts in strings."""

    true_value: str | None = None
    false_value: str | None = None


class TokenBounds(Section):
    """How many rows may hold a word."""

    min_fraction: Fraction = 0.0
    max_fraction: Fraction = 1.0


class FeatureSchema(Section):
    """What one feature must look like."""

    type: Literal["int", "float", "string", "uint8"]
    shape: tuple[int | None, ...] = Field((), description="Of one example; null: any length. Absent for a scalar.")
    lifecycle: Literal["planned", "alpha", "beta", "debug", "production", "deprecated"] = Field(
        "production", description="planned, alpha, debug and deprecated features are not checked."
    )
    in_environment: list[Environment] | None = Field(None, description="Only there; default: default_environment.")
    not_in_environment: list[Environment] = Field([], description="Not there, as a label is not in serving.")
    min_fraction: Fraction = Field(0.0, description="Least share of rows that have a value.")
    min_count: NonNegative = Field(0, description="Least number of rows that have a value.")
    min_values: NonNegative | None = Field(None, description="Least number of values in a row that has some.")
    max_values: NonNegative | None = Field(None, description="Greatest number of values in a row.")
    domain: list[str] | None = Field(None, description="string: the only values allowed; of text, the words known.")
    min_domain_mass: Fraction = Field(1.0, description="Least share of values inside the domain.")
    bool_domain: BoolDomain | None = Field(None, description="Only two values: 0 and 1, or two texts.")
    encodes: Literal["int", "float"] | None = Field(None, description="string: it holds such numbers as text.")
    min: float | None = Field(None, description="Smallest number allowed.")
    max: float | None = Field(None, description="Largest number allowed.")
    disallow_nan: bool = Field(False, description="float: NaN, which also stands for a missing value, is refused.")
    min_unique: NonNegative | None = Field(None, description="int, string: fewest distinct values.")
    max_unique: NonNegative | None = Field(None, description="int, string: most distinct values.")
    max_bytes: NonNegative | None = Field(None, description="string, uint8: largest size of one value in bytes.")
    min_coverage: Fraction | None = Field(None, description="text: least share of words that are in the domain.")
    min_mean_token_length: Annotated[float, Field(ge=0)] | None = Field(
        None, description="text: least mean length of a word in characters."
    )
    tokens: dict[str, TokenBounds] = Field({}, description="text: word -> least and greatest share of rows with it.")
    drift: Comparator | None = Field(None, description="Largest distance from the last span.")
    skew: Comparator | None = Field(None, description="Largest distance of served requests from the train split.")

    @property
    def is_checked(self) -> bool:
        """Whether its stage of life asks for checks."""
        return self.lifecycle not in _UNCHECKED

    @model_validator(mode="after")
    def _only_what_the_type_has(self) -> FeatureSchema:
        self._refuse("domain", self.domain is not None, ("string",))
        self._refuse("encodes", self.encodes is not None, ("string",))
        self._refuse("tokens", bool(self.tokens), ("string",))
        self._refuse("disallow_nan", self.disallow_nan, ("float",))
        self._refuse("max_bytes", self.max_bytes is not None, ("string", "uint8"))
        self._refuse("bool_domain", self.bool_domain is not None, ("int", "float", "string"))
        bounded = self.min is not None or self.max is not None
        if bounded and self.type not in ("int", "float") and not self.encodes:
            raise ValueError(
                f"min and max are for int and float features, this one is {self.type} [DOMAIN_INVALID_FOR_TYPE]"
            )
        for comparator in (self.drift, self.skew):
            categorical = comparator and {"l_infinity", "normalized_difference"} & comparator.thresholds.keys()
            self._refuse("drift and skew by l_infinity or normalized_difference", bool(categorical), ("int", "string"))
            self._refuse("drift and skew", comparator is not None, ("int", "float", "string"))
        return self

    @model_validator(mode="after")
    def _nothing_that_cannot_be(self) -> FeatureSchema:
        for low, high in (("min_values", "max_values"), ("min", "max"), ("min_unique", "max_unique")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low} {least:g} is above {high} {most:g} [INVALID_SCHEMA_SPECIFICATION]")
        if any(bound is not None and math.isnan(bound) for bound in (self.min, self.max)):
            raise ValueError("min and max are numbers, received nan [INVALID_SCHEMA_SPECIFICATION]")
        needs_domain = [name for name in ("min_domain_mass", "min_coverage") if name in self.model_fields_set]
        if needs_domain and self.domain is None:
            raise ValueError(f"{needs_domain[0]} needs a domain [INVALID_SCHEMA_SPECIFICATION]")
        if self.domain is not None and len(set(self.domain)) < len(self.domain):
            twice = next(value for value in self.domain if self.domain.count(value) > 1)
            raise ValueError(f"the domain has {twice!r} twice [INVALID_DOMAIN_SPECIFICATION]")
        if self.bool_domain is not None:
            self._check_bool(self.bool_domain)
        return self

    def _check_bool(self, values: BoolDomain) -> None:
        texts = (values.true_value, values.false_value)
        if self.type == "string" and (None in texts or texts[0] == texts[1]):
            raise ValueError(
                "bool_domain of a string needs a true_value and another false_value [INVALID_DOMAIN_SPECIFICATION]"
            )
        if self.type != "string" and texts != (None, None):
            raise ValueError("bool_domain of a number is 0 and 1: write bool_domain: {} [INVALID_DOMAIN_SPECIFICATION]")

    def _refuse(self, name: str, given: bool, types: tuple[str, ...]) -> None:
        if given and self.type not in types:
            verb = "are" if " and " in name else "is"
            allowed = " and ".join(types)
            raise ValueError(f"{name} {verb} for {allowed} features, this one is {self.type} [DOMAIN_INVALID_FOR_TYPE]")


class DatasetSchema(Section):
    """How many rows each split must have."""

    min_examples: NonNegative | None = Field(None, description="Fewest rows of a split.")
    max_examples: NonNegative | None = Field(None, description="Most rows of a split.")
    min_fraction_of_last: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Least number of rows, as a share of those of the last span's split."
    )
    max_fraction_of_last: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Greatest number of rows, as a share of those of the last span's split."
    )


class Defaults(Section):
    """Thresholds of features that have none of their own, each for the measure that suits the feature."""

    drift: Comparator = Comparator()
    skew: Comparator = Comparator()


class Schema(Section):
    """The features that data must have, and no others."""

    default_environment: list[Environment] = Field(
        ["training", "serving"], description="Where features are that do not say so themselves."
    )
    dataset: DatasetSchema = DatasetSchema()
    defaults: Defaults = Defaults()
    features: dict[Annotated[str, Field(min_length=1)], FeatureSchema]

    def in_environment(self, name: str, environment: Environment) -> bool:
        """Whether the data of an environment has a feature."""
        feature = self.features[name]
        where = self.default_environment if feature.in_environment is None else feature.in_environment
        return environment in where and environment not in feature.not_in_environment
