"""The section `transform`: one class an operation, in the order of the table in docs/transform.md."""

from __future__ import annotations

import datetime
import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from components.section import Count, Fraction, Section, refuse_unread

Positive = Annotated[float, Field(gt=0)]
DatePart = Literal["year", "month", "day", "weekday", "day_of_year", "hour", "minute", "days_since"]
# Values that a part of a date takes; of the others there is no end.
CYCLES: dict[str, int] = {"month": 12, "day": 31, "weekday": 7, "day_of_year": 366, "hour": 24, "minute": 60}


def _day(value: Any) -> str:
    """YAML reads 2024-02-29 as a date of its own."""
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"must be a day such as 2024-02-29, received {str(value)!r}") from None


class _Scaled(Section):
    """What the operations on single numbers have in common."""

    input: str | None = Field(None, description="Raw feature; default: the output's own name.")
    impute: Literal["mean", "median", "most_frequent", "constant"] | None = Field(
        None, description="What a missing value becomes before the operation; without it see the operation."
    )
    fill_value: float | None = Field(None, description="impute: constant: the number.")
    missing_indicator: bool = Field(False, description="Add a second column: 1 where the value is missing.")

    @model_validator(mode="after")
    def _constant_is_given(self) -> Any:
        if (self.impute == "constant") != (self.fill_value is not None):
            raise ValueError("impute: constant and fill_value belong together: give both or neither")
        return self


class Normalize(_Scaled):
    """Z-score by the train split's mean and standard deviation; a missing value becomes 0."""

    op: Literal["normalize"] = "normalize"
    log: bool = Field(False, description="Take log(1 + x) of non-negative values first.")
    key: str | None = Field(
        None,
        description="A string or integer feature: mean and deviation are those of its value; of an unseen or missing "
        "one, those of all rows.",
    )


class MinMax(_Scaled):
    """The train split's smallest and largest value onto `range`; a missing value becomes their mean first."""

    op: Literal["min_max"]
    range: tuple[float, float] = (0.0, 1.0)
    clip: bool = Field(True, description="Values beyond the train split's become the ends of the range.")

    @model_validator(mode="after")
    def _range_ascends(self) -> MinMax:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range must ascend, received {list(self.range)}")
        return self


class Robust(_Scaled):
    """Distance from the train split's median in units of a range of its quantiles; a missing value becomes 0."""

    op: Literal["robust"]
    quantile_range: tuple[Fraction, Fraction] = Field((0.25, 0.75), description="Its ends: of the ordered values.")

    @model_validator(mode="after")
    def _range_ascends(self) -> Robust:
        if not self.quantile_range[0] < self.quantile_range[1]:
            raise ValueError(f"quantile_range must ascend, received {list(self.quantile_range)}")
        return self


class Log(_Scaled):
    """log(1 + x), of negative values 0; a missing value becomes 0."""

    op: Literal["log"]


class Impute(_Scaled):
    """The number as it is; a missing one becomes the train split's mean, median or most frequent value, or a constant."""

    op: Literal["impute"]
    impute: Literal["mean", "median", "most_frequent", "constant"] = "mean"


class Bucketize(Section):
    """Number of the quantile bucket that the value falls into; a missing value has a bucket of its own."""

    op: Literal["bucketize"]
    input: str | None = None
    num_buckets: Annotated[int, Field(ge=2)] = 10
    boundaries: list[float] = Field([], description="Where buckets begin, in place of the train split's quantiles.")

    @model_validator(mode="after")
    def _boundaries_ascend(self) -> Bucketize:
        if self.boundaries:
            refuse_unread(self, ["num_buckets"], "boundaries")
        if self.boundaries != sorted(set(self.boundaries)) or not all(map(math.isfinite, self.boundaries)):
            raise ValueError(f"boundaries must be finite and ascend, received {self.boundaries}")
        return self


class _Categories(Section):
    """What the operations that give numbers of categories have in common."""

    output: Literal["ids", "multi_hot", "count"] = Field(
        "ids", description="multi_hot, count: a vector with a place for each category; of a list, all its values in it."
    )
    length: Count | None = Field(None, description="ids of a list: places, filled with 0 or cut at the end.")

    @model_validator(mode="after")
    def _length_has_a_reader(self) -> Any:
        refuse_unread(self, [] if self.output == "ids" else ["length"], f"output: {self.output}")
        return self


class Vocabulary(_Categories):
    """Number of the value in the train split's vocabulary, most frequent first; 0 stands for values not in it."""

    op: Literal["vocabulary"]
    input: str | None = None
    max_tokens: Count | None = Field(None, description="At most so many, the most frequent ones.")
    min_count: Count = Field(1, description="Fewest rows of the train split with a value.")
    num_oov_buckets: Count = Field(1, description="First numbers, that values outside the vocabulary are hashed onto.")
    missing: Literal["oov", "category", "most_frequent"] = Field(
        "oov", description="A missing value: one outside the vocabulary, a category of its own (the last), or imputed."
    )
    vocabulary: list[str | int] = Field([], description="The values, in place of the train split's.")
    vocabulary_path: str | None = Field(None, description="File in UTF-8 with one value a line, in their place.")

    @model_validator(mode="after")
    def _is_from_one_place(self) -> Vocabulary:
        given = [name for name in ("vocabulary", "vocabulary_path") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError("the values come from one place: leave out 'vocabulary' or 'vocabulary_path'")
        if given:
            refuse_unread(self, ["max_tokens", "min_count"], given[0])
        return self


class Hash(_Categories):
    """Number of the hash bin that the value falls into."""

    op: Literal["hash"]
    input: str | None = None
    num_bins: Annotated[int, Field(ge=2)]
    salt: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(None, description="Another one gives other bins.")


class Cross(Section):
    """Number of the hash bin that a combination of values falls into."""

    op: Literal["cross"]
    inputs: Annotated[list[str], Field(min_length=2)] = Field(
        description="Strings or integers: raw features, or by their names operations that give one id, as bucketize."
    )
    num_bins: Annotated[int, Field(ge=2)]
    salt: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(None, description="Another one gives other bins.")


class Tokenization(Section):
    """How a text is cut into tokens, as keras.layers.TextVectorization does it."""

    standardize: Literal["lower_and_strip_punctuation", "lower", "strip_punctuation", "none"] = (
        "lower_and_strip_punctuation"
    )
    split: Literal["whitespace", "character"] = "whitespace"
    ngrams: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="Sequences of up to so many words are tokens, too."
    )


WORDS = Tokenization()


class Text(Tokenization):
    """Tokens of a text, as ids (0 pads, 1 is unknown) or as one vector: by default words in lower case, no punctuation."""

    op: Literal["text"]
    input: str | None = None
    max_tokens: Annotated[int, Field(ge=3)] = 20_000
    min_count: Count = Field(1, description="Fewest occurrences of a token in the train split.")
    length: Count = Field(256, description="ids: number of tokens kept, counted from the start.")
    output: Literal["ids", "tf_idf", "multi_hot", "count"] = "ids"

    @model_validator(mode="after")
    def _length_has_a_reader(self) -> Text:
        refuse_unread(self, [] if self.output == "ids" else ["length"], f"output: {self.output}")
        return self

    @property
    def tokenization(self) -> Tokenization:
        """How the text is cut, without what becomes of the tokens."""
        return Tokenization(**{name: getattr(self, name) for name in Tokenization.model_fields})


class Date(Section):
    """Parts of a date: of ISO 8601 text, or of a number of seconds since 1970. Malformed ones count as missing."""

    op: Literal["date"]
    input: str | None = None
    parts: Annotated[list[DatePart], Field(min_length=1)]
    output: Literal["cyclic", "number", "ids"] = Field(
        "cyclic",
        description="cyclic: sine and cosine of each part; number: the parts; ids: the number of one part, missing last.",
    )
    zone: Literal["utc", "written"] = Field(
        "utc", description="written: the parts as they stand in the text, whatever its offset from UTC."
    )
    since: Annotated[str, BeforeValidator(_day)] = Field("1970-01-01", description="days_since: the day that is 0.")
    missing_indicator: bool = Field(False, description="Add a last column: 1 where the date is missing.")

    @model_validator(mode="after")
    def _parts_have_a_cycle(self) -> Date:
        endless = [part for part in self.parts if part not in CYCLES]
        if self.output != "number" and endless:
            raise ValueError(f"{endless[0]} has no end: give it with output: number, received output: {self.output}")
        if self.output == "ids" and len(self.parts) > 1:
            raise ValueError(f"output: ids is of one part, received {self.parts}: write an operation for each")
        refuse_unread(self, ["missing_indicator"] if self.output == "ids" else [], "output: ids")
        refuse_unread(self, [] if "days_since" in self.parts else ["since"], "parts without days_since")
        return self


class Image(Section):
    """An image scaled to [0, 1], resized if asked, then normalised by mean and standard deviation per channel."""

    op: Literal["image"]
    input: str | None = None
    size: tuple[Count, Count] | None = Field(None, description="(height, width) in pixels.")
    mean: list[float] = Field([0.0])
    std: list[Positive] = Field([1.0])
    decode: bool = Field(False, description="The feature holds files: JPEG, PNG, GIF or BMP; an empty one becomes 0.")
    channels: Literal[1, 3] = Field(3, description="decode: 1 for grey, 3 for red, green and blue.")

    @model_validator(mode="after")
    def _decoded_images_have_one_size(self) -> Image:
        refuse_unread(self, [] if self.decode else ["channels"], "decode: false")
        if self.decode and self.size is None:
            raise ValueError("decode needs size: [height, width], since files may differ in theirs")
        return self


Op = Annotated[
    Normalize | MinMax | Robust | Log | Impute | Bucketize | Vocabulary | Hash | Cross | Text | Date | Image,
    Field(discriminator="op"),
]


class TokenCounts(Section):
    """A text feature whose tokens are counted in one more way than words."""

    feature: str
    tokenization: Tokenization


class GroupedMoments(Section):
    """A number whose mean and deviation are kept for each value of a key."""

    number: str
    key: str


class TransformNeeds(Section):
    """What the operations need of the statistics beside those of each feature."""

    tokens: list[TokenCounts] = Field([])
    moments: list[GroupedMoments] = Field([])
    files: list[str] = Field([], description="String features that hold files, of which no value is kept.")


NOTHING_MORE = TransformNeeds()


class TransformConfig(Section):
    """How raw features become the model's inputs (step `transform`)."""

    features: dict[str, Op] = Field(
        {},
        description="Output name -> operation. Empty: numbers are normalised, strings looked up, images scaled.",
    )

    @property
    def text_features(self) -> list[str]:
        """The raw features whose words are counted."""
        return [op.input or name for name, op in self.features.items() if isinstance(op, Text)]

    @property
    def vocabulary_paths(self) -> dict[str, str]:
        """Output name -> file with its vocabulary."""
        return {
            name: op.vocabulary_path
            for name, op in self.features.items()
            if isinstance(op, Vocabulary) and op.vocabulary_path is not None
        }

    @property
    def needs(self) -> TransformNeeds:
        """What the statistics have to keep for the operations, each thing once."""
        tokens = {
            (source, op.tokenization): TokenCounts(feature=source, tokenization=op.tokenization)
            for name, op in self.features.items()
            if isinstance(op, Text) and op.tokenization != WORDS and (source := op.input or name)
        }
        moments = {
            (source, op.key): GroupedMoments(number=source, key=op.key)
            for name, op in self.features.items()
            if isinstance(op, Normalize) and op.key is not None and (source := op.input or name)
        }
        files = {op.input or name for name, op in self.features.items() if isinstance(op, Image) and op.decode}
        return TransformNeeds(tokens=list(tokens.values()), moments=list(moments.values()), files=sorted(files))
