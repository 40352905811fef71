"""The files of `data.path`: found, watched while they are read, and in UTF-8."""

from __future__ import annotations

import codecs
import contextlib
import encodings.aliases
import gzip
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from components.errors import ConfigError, DataError, did_you_mean
from components.external import data_files, unreadable

_BLOCK = 1 << 20
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def find_files(path: str | Sequence[Path] | None) -> list[Path]:
    """The files that `data.path` names, none of them empty; those given, where it has been looked up.

    Raises:
        ConfigError: no path was given.
        DataError: there is no such file, or it is empty or not readable.
    """
    if path is None:
        raise ConfigError("data.path: this source needs a file, folder or glob.")
    try:
        files = data_files(path) if isinstance(path, str) else list(path)
    except OSError as error:
        raise unreadable(str(path), error, "data.path") from error
    if not files:
        what = f"the folder {path} holds no file" if Path(str(path)).is_dir() else f"there is no file {path}"
        raise DataError(f"data.path: {what} (seen from {Path.cwd()}). Correct the path, or put the data there.")
    for file in files:
        if not _first_bytes(file):
            raise DataError(f"data.path: {file} is empty. Delete it or write it again.")
    return files


@contextlib.contextmanager
def at_rest(files: list[Path]) -> Iterator[None]:
    """Refuse what was read in the block if one of the files vanished or changed meanwhile.

    Raises:
        DataError: naming the file; also in place of an error in the block, which follows from it.
    """
    before = {file: _state(file) for file in files}
    try:
        yield
    except (DataError, OSError) as error:
        if (changed := _what_changed(before)) is not None:
            raise changed from error
        raise
    if (changed := _what_changed(before)) is not None:
        raise changed


@contextlib.contextmanager
def text_files(path: str | Sequence[Path] | None, encoding: str) -> Iterator[list[Path]]:
    """The files of `data.path` in UTF-8: those in another encoding as copies, which last as long as the block.

    Args:
        path: File, folder or glob, or files.
        encoding: Any that Python knows, such as `latin-1` or `utf-16`.

    Raises:
        ConfigError: there is no such encoding.
        DataError: a file is missing, damaged or not in that encoding, or changed during the block.
    """
    codec = find_encoding(encoding)
    files = find_files(path)
    with at_rest(files), contextlib.ExitStack() as stack:
        if codec == "utf-8":
            for file in files:
                if file.suffix == ".gz":
                    _check_gzip(file)
                elif _first_bytes(file) in _WIDE_MARKS:
                    raise DataError(f"data.path: {file} is in UTF-16. Set data.args.encoding: utf-16.")
            yield files
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-text-")))
        copies = {_copied(file, folder / str(number), codec): file for number, file in enumerate(files)}
        try:
            yield list(copies)
        except DataError as error:
            message = str(error)
            for copy, file in copies.items():
                message = message.replace(str(copy), str(file))
            raise DataError(message) from error


def find_encoding(name: str) -> str:
    """Python's name of an encoding.

    Raises:
        ConfigError: there is none of that name.
    """
    try:
        codec = codecs.lookup(name)
        "a".encode(name)  # zlib and its like turn bytes into bytes, and are no encodings of text
    except (LookupError, TypeError) as error:
        hint = did_you_mean(str(name), set(encodings.aliases.aliases.values())).partition(" Known")[0]
        raise ConfigError(
            f"data.args.encoding: there is no encoding '{name}'.{hint} Such as latin-1, utf-16."
        ) from error
    return codec.name


def first_lines(error: Exception) -> str:
    """The telling lines of a library's message, as sentences."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
    return " ".join(line if line.endswith((".", "!", "?")) else f"{line}." for line in lines[:3])


def names_of(files: list[Path]) -> str:
    """The first few of the files, for a message."""
    return ", ".join(str(file) for file in files[:3]) + (" ..." if len(files) > 3 else "")


def _first_bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(2)
    except OSError as error:
        raise unreadable(file, error, "data.path") from error


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _what_changed(before: dict[Path, tuple[int, int, int] | None]) -> DataError | None:
    for file, state in before.items():
        if (now := _state(file)) != state:
            what = "vanished" if now is None else "changed"
            return DataError(f"data.path: {file} {what} while it was read. Run again when the data is at rest.")
    return None


def _check_gzip(file: Path) -> None:
    """Refuse a gzipped file that is cut off or damaged: DuckDB compares no checksum and reads other values from it."""
    try:
        with gzip.open(file) as stream:
            while stream.read(_BLOCK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged_gzip(file, error) from error


def _copied(file: Path, folder: Path, codec: str) -> Path:
    """A copy of the file in UTF-8, unzipped, under its own name."""
    folder.mkdir()
    copy = folder / (file.stem if file.suffix == ".gz" else file.name)
    zipped = file.suffix == ".gz"
    try:
        # newline="": a carriage return within quotes is data.
        with (
            (gzip.open if zipped else open)(file, "rt", encoding=codec, newline="") as source,
            copy.open("w", encoding="utf-8", newline="") as target,
        ):
            while block := source.read(_BLOCK):
                target.write(block)
    except UnicodeError as error:
        raise DataError(f"data.path: {file} is not in {codec}: {error}. Correct data.args.encoding.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged_gzip(file, error) from error
    except OSError as error:
        raise unreadable(file, error, "data.path") from error
    return copy


def _damaged_gzip(file: Path, error: Exception) -> DataError:
    return DataError(
        f"data.path: {file} is cut off, damaged or not gzipped: {error}. Copy it again, or name it without .gz."
    )
