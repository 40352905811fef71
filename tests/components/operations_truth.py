"""Edge values for every operation, and what numpy or Python makes of them."""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from components.examples import MISSING_INT, ExamplesInfo, Feature
from tests.components.hashes import farmhash64, siphash64

F, MAX_INT = np.float32, 2**63 - 1
N = 12


def strings(*values: Any) -> np.ndarray:
    out = np.empty(len(values), object)
    out[:] = [value.encode() if isinstance(value, str) else value for value in values]
    return out


def lists(dtype: Any, padding: Any, *rows: list[Any]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [padding] * (width - len(row)) for row in rows], dtype)


def picture(value: int, height: int = 4, width: int = 4) -> np.ndarray:
    return (np.arange(height * width * 3).reshape(height, width, 3) * 5 + value).astype(np.uint8)


PNG, JPEG = tf.io.encode_png, lambda image: tf.io.encode_jpeg(image, quality=100)
FILES = strings(
    PNG(picture(1)).numpy(),
    JPEG(np.full((8, 8, 3), 120, np.uint8)).numpy(),
    b"",
    PNG(picture(3, 4, 4)[..., :1]).numpy(),
)
FEATURES = {
    "amount": Feature("float"),
    "count": Feature("int"),
    "city": Feature("string"),
    "code": Feature("int"),
    "words": Feature("string"),
    "when": Feature("string"),
    "stamp": Feature("int"),
    "moment": Feature("float"),
    "file": Feature("string"),
    "picture": Feature("uint8", (4, 4, 3)),
    "vector": Feature("float", (3,)),
    "tags": Feature("string", (None,)),
    "numbers": Feature("int", (None,)),
    "label": Feature("int"),
}
INFO = ExamplesInfo(FEATURES, "label", "binary", None, {"train": N})

TRAIN: dict[str, np.ndarray] = {
    "amount": np.array([0, 1, 3, np.nan, 8, 2, 5, 9, 4, 7, 6, 30], F),
    "count": np.array([4, 4, 9, MISSING_INT, 7, 4, 9, 12, 1, 1, 2, 3]),
    "city": strings(*("oslo", "rome", "oslo", "", "città", "rome", "oslo", "[UNK]", "bonn", "bonn", "kiev", "oslo")),
    "code": np.array([3, 3, -1, MISSING_INT, -1, 3, 3, 8, 8, 8, 2, 3]),
    "words": strings("The cat, the DOG!", "a cat", "", "dog", "the cat", "[UNK] x", *["the dog"] * 6),
    "when": strings(*["2020-01-01"] * N),
    "stamp": np.zeros(N, np.int64),
    "moment": np.zeros(N, F),
    "file": strings(*[FILES[i % 4] for i in range(N)]),
    "picture": np.stack([picture(i) for i in range(N)]),
    "vector": np.arange(N * 3, dtype=F).reshape(N, 3),
    "tags": lists(object, b"", [b"red", b"blue"], [b"red"], *[[]] * 9, [b"red", b"blue", b"green"]),
    "numbers": lists(np.int64, MISSING_INT, [5, 6], [5], *[[]] * 9, [5, 6, 7]),
    "label": np.array([0, 1] * 6),
}
# Missing, unseen, empty and extreme ones.
EDGES: dict[str, np.ndarray] = {
    "amount": np.array([np.nan, 0, -1, 2.5, 1e38, -1e38, np.inf, -np.inf, 1e-40, 30, -0.0, 3.4e38], F),
    "count": np.array([MISSING_INT, MISSING_INT + 1, MAX_INT, 4, 9, 0, -1, 7, 2**53 + 1, 1, 12, 3]),
    "city": strings(
        "", "oslo", "città", "paris", "[UNK]", b"\xff\xfe", " oslo", "OSLO", "x" * 16, "bonn", "\0oov", "a"
    ),
    "code": np.array([MISSING_INT, MISSING_INT + 1, MAX_INT, 3, -1, 0, 8, 2, -2, 5, 7, 1]),
    "words": strings(
        "",
        " ",
        "the the DOG?",
        "zebra",
        "...",
        "[UNK]",
        b"\xff dog",
        "a" * 5000,
        "dog cat the",
        "città",
        "the",
        "\n\tdog",
    ),
    "when": strings(
        *("", "2024-02-29", "2023-02-29", "2024-12-31T23:59:59.999+05:30", "0001-01-01", "9999-12-31T23:59:59Z"),
        *(
            "2024-02-29 24:00",
            "20240229T101112-0800",
            "today",
            "0001-01-01T00:00+01:00",
            "2024-02-29T10:11-08",
            b"\xff",
        ),
    ),
    "stamp": np.array(
        [
            MISSING_INT,
            MAX_INT,
            0,
            -1,
            1709164799,
            1709164800,
            -62135596800,
            -62135596801,
            253402300799,
            253402300800,
            1,
            2,
        ]
    ),
    "moment": np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0, -1, 86399, 86400, 1e9, -1e9, 0.5], F),
    "file": strings(*[FILES[i % 4] for i in range(N)]),
    "picture": np.stack([*([np.zeros((4, 4, 3), np.uint8)] * 2), *[picture(i * 9) for i in range(N - 2)]]),
    "vector": np.concatenate([np.full((2, 3), np.nan, F), np.arange(30, dtype=F).reshape(10, 3) * 1e30]),
    "tags": lists(
        object, b"", [], [b"red"], [b"red", b"red", b"", b"pink"], [b"a", b"b", b"c", b"d", b"red"], *[[b"blue"]] * 8
    ),
    "numbers": lists(np.int64, MISSING_INT, [], [5], [5, 5, MISSING_INT, MAX_INT], [1, 2, 3, 4, 5], *[[6]] * 8),
}


# ---- the truth, in numpy and Python


def masked(raw: np.ndarray) -> np.ndarray:
    """float64 with NaN where the value is missing; what the operations see of it is float32."""
    values = raw.astype(F).astype(np.float64)
    values[raw == MISSING_INT] = np.nan
    return values


def moments(values: np.ndarray) -> tuple[float, float]:
    return float(np.nanmean(values)), float(np.nanstd(values))


def filled(raw: np.ndarray, fill: float) -> np.ndarray:
    return np.where(np.isnan(masked(raw)), fill, masked(raw))


def column(values: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(values, F)[:, np.newaxis]


def quantile(values: np.ndarray, rank: float) -> float:
    return float(np.nanquantile(values, rank, method="inverted_cdf"))


AMOUNT, COUNT = masked(TRAIN["amount"]), masked(TRAIN["count"])
X, C = masked(EDGES["amount"]), masked(EDGES["count"])
MISSING = np.isnan(X).astype(F)
LOG = np.log1p(np.maximum(X, 0))


def normalized(values: np.ndarray, of: np.ndarray) -> np.ndarray:
    mean, std = moments(of)
    return np.nan_to_num((values - mean) / std, nan=0.0, posinf=np.inf, neginf=-np.inf)


def by_key() -> np.ndarray:
    mean, std = moments(AMOUNT)
    out = []
    for x, city in zip(X, EDGES["city"], strict=True):
        own = AMOUNT[(TRAIN["city"] == city) & ~np.isnan(AMOUNT)] if city else AMOUNT[:0]
        m, s = (own.mean(), own.std() or std) if len(own) else (mean, std)
        out.append(0.0 if np.isnan(x) else (x - m) / s)
    return column(out)


def min_max(begin: float, end: float, *, clip: bool) -> np.ndarray:
    low, high = np.nanmin(AMOUNT), np.nanmax(AMOUNT)
    out = (np.where(np.isnan(X), np.nanmean(AMOUNT), X) - low) / (high - low) * (end - begin) + begin
    return column(np.clip(out, begin, end) if clip else out)


def robust(low: float, high: float) -> np.ndarray:
    width = quantile(AMOUNT, high) - quantile(AMOUNT, low)
    return column(np.nan_to_num((X - quantile(AMOUNT, 0.5)) / width, nan=0.0, posinf=np.inf, neginf=-np.inf))


def bucketed(boundaries: list[float]) -> np.ndarray:
    places = np.searchsorted(np.array(boundaries, F), EDGES["amount"], side="right")
    return np.where(np.isnan(EDGES["amount"]), len(boundaries) + 1, places)[:, np.newaxis]


def frequent(values: Any, missing: Any) -> list[Any]:
    counts = Counter(value for value in np.ravel(values).tolist() if value != missing)
    return [value for value, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


CITIES, CODES, TAGS = frequent(TRAIN["city"], b""), frequent(TRAIN["code"], MISSING_INT), frequent(TRAIN["tags"], b"")


def looked_up(values: np.ndarray, vocabulary: list[Any], num_oov: int = 1) -> np.ndarray:
    def other(value: Any) -> int:
        return (farmhash64(value) if isinstance(value, bytes) else value) % num_oov

    return np.array([vocabulary.index(v) + num_oov if v in vocabulary else other(v) for v in values.tolist()])


def one_hot(ids: np.ndarray, size: int) -> np.ndarray:
    return np.eye(size, dtype=F)[ids]


def of_lists(ids: Callable[[np.ndarray], np.ndarray], name: str, size: int, *, binary: bool) -> np.ndarray:
    out = np.zeros((N, size), F)
    for row, values in enumerate(EDGES[name]):
        there = values[values != (b"" if name == "tags" else MISSING_INT)]
        np.add.at(out[row], ids(there).astype(int), 1)
    return np.minimum(out, 1) if binary else out


def padded(ids: Callable[[np.ndarray], np.ndarray], name: str, length: int) -> np.ndarray:
    values = EDGES[name][:, :length]
    there = values != (b"" if name == "tags" else MISSING_INT)
    out = np.zeros((N, length), np.int64)
    out[:, : values.shape[1]] = np.where(there, np.stack([ids(row) for row in values]) + 1, 0)
    return out


def bins(texts: list[bytes], num: int, salt: int | None = None) -> np.ndarray:
    return np.array([(farmhash64(t) if salt is None else siphash64(t, salt)) % num for t in texts])[:, np.newaxis]


def as_texts(name: str) -> list[bytes]:
    values = EDGES[name].tolist()
    return values if FEATURES[name].type == "string" else [str(value).encode() for value in values]


def crossed(*columns: list[bytes]) -> list[bytes]:
    return [b"\0".join(row) for row in zip(*columns, strict=True)]


def tokens(
    text: bytes, *, lower: bool = True, strip: bool = True, characters: bool = False, ngrams: int = 1
) -> list[bytes]:
    text = text.lower() if lower else text
    text = re.sub(rb"[!-/:-@\[-`{-~]", b"", text) if strip else text
    parts = [c.encode() for c in text.decode(errors="replace")] if characters else text.split()
    return [b" ".join(parts[i : i + n]) for n in range(1, ngrams + 1) for i in range(len(parts) - n + 1)]


def texts(output: str, length: int = 3, min_count: int = 1, **how: Any) -> np.ndarray:
    documents = [tokens(text, **how) for text in TRAIN["words"]]
    counts = Counter(token for document in documents for token in document if token != b"[UNK]")
    known = sorted((t for t, c in counts.items() if c >= min_count), key=lambda t: (-counts[t], t))
    idf = [math.log(1 + N / (1 + sum(token in document for document in documents))) for token in known]
    weights = np.array([np.mean(idf), *idf])
    ids, vectors = np.zeros((N, length), np.int64), np.zeros((N, len(known) + 1))
    for row, text in enumerate(EDGES["words"]):
        places = [known.index(token) + 1 if token in known else 0 for token in tokens(text, **how)]
        ids[row, : len(places[:length])] = np.array(places[:length], int) + 1
        np.add.at(vectors[row], np.array(places, int), 1)
    return {
        "ids": ids,
        "count": vectors.astype(F),
        "multi_hot": np.minimum(vectors, 1).astype(F),
        "tf_idf": (vectors * weights).astype(F),
    }[output]


UTC = datetime.timezone.utc


def read_date(value: Any, written: bool = False) -> datetime.datetime | None:
    try:
        if not isinstance(value, bytes):
            return datetime.datetime(1970, 1, 1, tzinfo=UTC) + datetime.timedelta(seconds=math.floor(value))
        date = datetime.datetime.fromisoformat(value.decode().replace("Z", "+00:00"))
        date = date.replace(tzinfo=UTC) if written or date.tzinfo is None else date.astimezone(UTC)
        return date.replace(microsecond=0)
    except (ValueError, OverflowError):
        return None


PARTS: dict[str, tuple[Callable[[datetime.datetime], float], int, int]] = {
    "year": (lambda d: d.year, 0, 0),
    "month": (lambda d: d.month, 1, 12),
    "day": (lambda d: d.day, 1, 31),
    "weekday": (lambda d: d.weekday(), 0, 7),
    "day_of_year": (lambda d: d.timetuple().tm_yday, 1, 366),
    "hour": (lambda d: d.hour, 0, 24),
    "minute": (lambda d: d.minute, 0, 60),
    "days_since": (lambda d: (d - datetime.datetime(2013, 1, 1, tzinfo=UTC)).total_seconds() / 86400, 0, 0),
}


def dates(name: str, parts: list[str], output: str, *, indicator: bool = False, written: bool = False) -> np.ndarray:
    rows = []
    for date in (read_date(value, written) for value in EDGES[name].tolist()):
        row: list[float] = []
        for part in parts:
            of, first, period = PARTS[part]
            if output == "ids":
                row.append(period if date is None else of(date) - first)
            elif output == "number":
                row.append(0 if date is None else of(date))
            else:
                angle = 0 if date is None else 2 * math.pi * (of(date) - first) / period
                row += [0, 0] if date is None else [math.sin(angle), math.cos(angle)]
        rows.append(row + [float(date is None)] * indicator)
    return np.array(rows, np.int64 if output == "ids" else F)


def halved(images: np.ndarray) -> np.ndarray:
    """Bilinear with half-pixel centres to half the size is the mean of 2x2."""
    count, height, width, channels = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4)) / 255


def decoded() -> np.ndarray:
    grey = np.repeat(picture(3)[..., :1], 3, axis=2)
    images = halved(np.stack([picture(1), np.full((4, 4, 3), 120), np.zeros((4, 4, 3)), grey]).astype(np.float64))
    out = (images - 0.5) / np.array([0.25, 0.5, 1.0])
    out[2] = 0  # there is no file
    return np.tile(out, (3, 1, 1, 1)).astype(F)
