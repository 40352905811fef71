"""What is in more than one split: entities, and rows that are alike in all that a model sees.

Rows are known by 62 bits of a hash (BLAKE2b), so that of a hundred million rows two that differ pass for one with a
probability of 0.1 %. At most 2**21 of the numbers, 8 bytes each, are kept in memory; more are divided among 256 files and
compared file by file, a hundred million in 50 MB.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.anomalies import DATASET, Anomaly
from components.config import DataConfig
from components.examples import SPLITS
from components.ingest.splits import SPLIT_NAMES, TRAIN, VALIDATION, readable, row_texts

_IN_MEMORY = 1 << 21
_PARTS = 256
_CARVED = 3  # of the train rows those that become validation if no row else is
_MOST_TEXTS = 100_000
_NO_ENTITY = np.uint64(0)
_MOST_EXAMPLES = 5
_KEYS = "keys.json"


class Leakage:
    """Looks at the rows of every split; costs nothing where the method itself keeps them apart.

    Args:
        config: How rows are divided, and what is looked at.
        folder: Where more is put than memory holds; gone when `anomalies` or `save` is done.
    """

    def __init__(self, config: DataConfig, folder: Path) -> None:
        split = config.split
        self._key = config.leakage.key or split.key
        by_hash = split.method in ("hash", "fold")
        kept_together = by_hash and split.key and set(split.key) <= set(self._key)
        entities_can_leak = config.leakage.check and self._key and not kept_together
        # Of two equal rows a hash or a time makes the same, unless what it looks at is dropped.
        decides = split.key if by_hash else [split.column]
        all_seen = not config.drop if by_hash and not split.key else set(decides).isdisjoint(config.drop)
        rows_can_leak = config.leakage.check and not (all_seen and (by_hash or split.method == "time"))
        # With a limit the order of the rows matters, and they are few.
        in_memory = _IN_MEMORY if config.limit is None else None
        self._limit = config.limit
        self._rows = _Codes(folder / "rows", in_memory) if rows_can_leak else None
        self._entities = _Codes(folder / "entities", in_memory) if entities_can_leak else None
        self._texts: dict[int, str] = {}
        self._folder = folder
        self._by_hash = by_hash

    def add(
        self, split: str, batch: pa.RecordBatch, records: Sequence[bytes], carved: np.ndarray | None = None
    ) -> None:
        """Take note of rows.

        Args:
            split: Where they are written.
            batch: With the columns of the key.
            records: The same rows as examples.
            carved: bool `(rows,)`, which of train become validation rows if there are no others.
        """
        number = SPLIT_NAMES[split]
        codes = np.full(batch.num_rows, number, np.uint64) if carved is None else np.where(carved, _CARVED, number)
        if self._rows is not None:
            digests = b"".join([hashlib.blake2b(record, digest_size=8).digest() for record in records])
            self._rows.add(np.frombuffer(digests, "<u8"), codes)
        if self._entities is not None:
            is_known = functools.reduce(pc.or_, [batch.column(name).is_valid() for name in self._key])
            distinct = row_texts(batch, self._key).dictionary_encode()
            texts = distinct.dictionary.to_pylist()
            digests = b"".join(
                [hashlib.blake2b(t.encode(errors="surrogatepass"), digest_size=8).digest() for t in texts]
            )
            hashes = np.frombuffer(digests, "<u8")
            of_rows = hashes[distinct.indices.to_numpy()]
            self._entities.add(np.where(is_known.to_numpy(zero_copy_only=False), of_rows, _NO_ENTITY), codes)
            self._keep(dict(zip((hashes >> np.uint64(2)).tolist(), texts, strict=True)))

    def save(self, folder: Path) -> None:
        """Write what one share of the rows has shown."""
        folder.mkdir()
        for name, codes in self._looked_at():
            codes.save(folder / name)
        (folder / _KEYS).write_text(json.dumps(self._texts))
        shutil.rmtree(self._folder, ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Add what `save` wrote."""
        for name, codes in self._looked_at():
            codes.load(folder / name, self._limit)
        self._keep({int(number): text for number, text in json.loads((folder / _KEYS).read_text()).items()})

    def anomalies(self, num_examples: dict[str, int], *, carved: bool) -> list[Anomaly]:
        """What was found, for each two splits.

        Args:
            num_examples: Rows of each split.
            carved: Whether validation rows were taken from those of train.
        """
        found = []
        self._texts = self._first_texts()
        for name, codes in self._looked_at():
            for (first, second), shared in sorted(codes.shared(carved, self._texts).items()):
                total = num_examples[SPLITS[second]]
                tell = self._shared_entities if name == "entities" else self._shared_rows
                found.append(tell(SPLITS[first], SPLITS[second], shared, total))
        shutil.rmtree(self._folder, ignore_errors=True)
        return found

    def _keep(self, texts: dict[int, str]) -> None:
        """Keep texts of keys: those of the smallest numbers, which are the same in whatever order they come."""
        self._texts |= texts
        if len(self._texts) > 2 * _MOST_TEXTS:
            self._texts = self._first_texts()

    def _first_texts(self) -> dict[int, str]:
        return {number: self._texts[number] for number in sorted(self._texts)[:_MOST_TEXTS]}

    def _looked_at(self) -> Iterator[tuple[str, _Codes]]:
        for name, codes in (("entities", self._entities), ("rows", self._rows)):
            if codes is not None:
                yield name, codes

    def _shared_entities(self, first: str, second: str, shared: _Shared, total: int) -> Anomaly:
        names = ", ".join(self._key)
        examples = ", ".join(sorted(readable(self._texts[number]) for number in shared.examples))
        advice = "Set data.split.key to them" if self._by_hash else "Divide the data by them"
        message = (
            f"values of {names} that the {first} split has, too: {shared.num_groups}"
            f"{f' (as {examples})' if examples else ''}, in {shared.num_rows} of {total} rows, which flatter the model. "
            f"{advice}, so that each is in one split."
        )
        return Anomaly("SPLITS_SHARE_ENTITIES", names, second, "warning", message)

    def _shared_rows(self, first: str, second: str, shared: _Shared, total: int) -> Anomaly:
        advice = ", or set data.split.key to a column that they have in common" if self._by_hash else ""
        message = (
            f"rows that the {first} split has, too, alike in every feature and the label: {shared.num_rows} of {total}. "
            f"If they are one thing twice, and not alike by chance, they flatter the model: leave duplicates out{advice}."
        )
        return Anomaly("SPLITS_SHARE_ROWS", DATASET, second, "warning", message)


@dataclass
class _Shared:
    """What two splits share.

    Attributes:
        num_groups: Different hashes.
        num_rows: Rows of the second split that have one of them.
        examples: Some of the hashes, of those whose text is known.
    """

    num_groups: int = 0
    num_rows: int = 0
    examples: list[int] = field(default_factory=list)


class _Codes:
    """Numbers of 62 bits of hash and 2 bits of split.

    Args:
        folder: Where they lie when they are many.
        in_memory: So many at most are in memory; None: all, in their order.
    """

    def __init__(self, folder: Path, in_memory: int | None) -> None:
        self._folder = folder
        self._in_memory = in_memory
        self._num_loaded = np.zeros(len(SPLITS), np.int64)  # rows of each split
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def add(self, hashes: np.ndarray, splits: np.ndarray) -> None:
        self._append(hashes & ~np.uint64(3) | splits.astype(np.uint64))

    def save(self, file: Path) -> None:
        with file.open("wb") as stream:
            for part in self._parts():
                stream.write(part.tobytes())

    def load(self, file: Path, limit: int | None) -> None:
        """Add what `save` wrote, up to so many rows of each split in all."""
        with file.open("rb") as stream:
            while len(codes := np.fromfile(stream, np.uint64, _IN_MEMORY)):
                self._append(codes if limit is None else codes[self._within(codes, limit)])

    def _within(self, codes: np.ndarray, limit: int) -> np.ndarray:
        """Which of the rows belong to the first `limit` of their split, bool `(rows,)`."""
        splits = _splits_of(codes, TRAIN)
        kept = np.zeros(len(codes), bool)
        for split in range(len(SPLITS)):
            rows = np.flatnonzero(splits == split)[: limit - self._num_loaded[split]]
            kept[rows] = True
            self._num_loaded[split] += len(rows)
        return kept

    def shared(self, carved: bool, texts: dict[int, str]) -> dict[tuple[int, int], _Shared]:
        """What each two splits share; nothing of those that share nothing."""
        found: dict[tuple[int, int], _Shared] = {}
        for part in self._parts():
            _compare(part, VALIDATION if carved else TRAIN, texts, found)
        return found

    def _append(self, codes: np.ndarray) -> None:
        self._waiting.append(codes)
        self._num_waiting += len(codes)
        if self._in_memory is not None and self._num_waiting >= self._in_memory:
            self._spill()

    def _spill(self) -> None:
        """Append what waits to the files; all numbers of one hash are in the same."""
        self._folder.mkdir(parents=True, exist_ok=True)
        codes = np.sort(np.concatenate(self._waiting))
        ends = np.searchsorted(codes >> np.uint64(56), np.arange(_PARTS + 1, dtype=np.uint64))
        for number, (start, end) in enumerate(itertools.pairwise(ends)):
            with (self._folder / f"{number:03d}").open("ab") as stream:
                codes[start:end].tofile(stream)
        self._waiting, self._num_waiting = [], 0

    def _parts(self) -> Iterator[np.ndarray]:
        if not self._folder.is_dir():
            yield np.concatenate([np.empty(0, np.uint64), *self._waiting])
            return
        self._spill()
        for file in sorted(self._folder.iterdir()):
            yield np.fromfile(file, np.uint64)


def _splits_of(codes: np.ndarray, carved_are: int) -> np.ndarray:
    splits = codes & np.uint64(3)
    return np.where(splits == _CARVED, carved_are, splits).astype(np.uint8)


def _compare(codes: np.ndarray, carved_are: int, texts: dict[int, str], found: dict[tuple[int, int], _Shared]) -> None:
    """Add to `found` what two splits share of some numbers."""
    codes = np.sort(codes[codes >> np.uint64(2) != _NO_ENTITY])
    hashes, splits = codes >> np.uint64(2), _splits_of(codes, carved_are)
    starts = (
        np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])) if len(codes) else np.empty(0, np.int64)
    )
    if len(starts) == len(codes):
        return
    masks = np.bitwise_or.reduceat(np.left_shift(1, splits, dtype=np.uint8), starts)
    groups = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(codes)))
    for first, second in itertools.combinations(range(len(SPLITS)), 2):
        is_shared = (masks >> first & masks >> second & 1).astype(bool)
        if not is_shared.any():
            continue
        shared = found.setdefault((first, second), _Shared())
        shared.num_groups += int(np.count_nonzero(is_shared))
        shared.num_rows += int(np.count_nonzero(is_shared[groups] & (splits == second)))
        known = (number for number in hashes[starts[is_shared]].tolist() if number in texts)
        shared.examples += itertools.islice(known, max(_MOST_EXAMPLES - len(shared.examples), 0))
