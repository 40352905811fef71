"""Text files: a text a file or a line, labelled by the folder or file that it lies in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa

from components.errors import ConfigError, DataError
from components.external import unreadable
from components.ingest.sources.files import at_rest, find_encoding, find_files
from components.ingest.splits import SPLIT_NAMES

_ROWS_PER_BATCH = 8192
_CHARACTERS_PER_BATCH = 32 << 20

_Row = tuple[str, tuple[str, ...]]  # a text, and what the folders say of it


def text(
    *, path: str | None, unit: Literal["file", "line"] = "file", encoding: str = "utf-8"
) -> Iterator[pa.RecordBatch]:
    """Text files.

    Yields `text`, and what the folders say: `label` for `<class>/x.txt` or, line by line, `<class>.txt`; `split`, too,
    where the outer folders are named train, validation and test.

    Args:
        path: File, folder or glob.
        unit: `file`: a file is a text. `line`: each line is one, without its end.
        encoding: Of the files, such as `latin-1` or `utf-16`; a byte order mark at the start is no text.

    Raises:
        ConfigError: there is no such unit or encoding.
        DataError: a file cannot be read, is not in that encoding, or changed while it was read.
    """
    if unit not in ("file", "line"):
        raise ConfigError(f"data.args.unit: 'file' or 'line', received {unit!r}.")
    codec = find_encoding(encoding)
    files = [file for file in find_files(path) if not file.name.startswith(".")]
    names, values = _folder_columns(Path(path or ""), files, by_file=unit == "line")
    with at_rest(files):
        rows = ((each, said) for file, said in zip(files, values, strict=True) for each in _texts(file, unit, codec))
        for batch in _in_batches(rows):
            columns = {"text": [row[0] for row in batch]}
            columns |= {name: [row[1][position] for row in batch] for position, name in enumerate(names)}
            yield pa.RecordBatch.from_pydict({name: pa.array(column, pa.string()) for name, column in columns.items()})


def _texts(file: Path, unit: str, codec: str) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig" if codec == "utf-8" else codec) as stream:
            if unit == "file":
                yield stream.read()
            else:
                for line in stream:
                    yield line.removesuffix("\n")
    except UnicodeError as error:
        raise DataError(f"data.path: {file} is not in {codec}: {error}. Set data.args.encoding.") from error
    except OSError as error:
        raise unreadable(file, error, "data.path") from error


def _folder_columns(root: Path, files: list[Path], *, by_file: bool) -> tuple[list[str], list[tuple[str, ...]]]:
    """The columns that stand in the paths, and their values for each file.

    Args:
        root: What `data.path` names; of a file or glob no folder says anything.
        files: Below it.
        by_file: A file may stand for a class.
    """
    folders = [file.relative_to(root).parent.parts if root.is_dir() else () for file in files]
    has_splits = all(parts and parts[0].lower() in SPLIT_NAMES for parts in folders)
    splits = [parts[:1] if has_splits else () for parts in folders]
    classes = [parts[has_splits:] for parts in folders]
    if by_file and not any(classes):
        classes = [(file.stem,) for file in files]
    depths = {len(parts) for parts in classes}
    if depths != {0} and depths != {1}:
        raise DataError(
            f"data.path: {root} has texts in folders of different depths. Give a folder for each class "
            "(also within train, validation and test), or a glob, whose folders say nothing."
        )
    names = ["split"] * has_splits + ["label"] * (depths == {1})
    return names, [split + label for split, label in zip(splits, classes, strict=True)]


def _in_batches(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row[0])
        if len(batch) == _ROWS_PER_BATCH or size >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
