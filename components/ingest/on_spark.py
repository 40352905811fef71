"""The rows of a source by the tasks of Spark: each encodes a share, and the shares are put together in the source's order.

Files of tables and records are read apart, with the types of all of them, which a first round finds out. Of any other
source, of a single file, of several spans, and where paths or shares of time are the splits, each task reads everything and
encodes every n-th batch. A source of the user's is read by one task, unless it takes `files`. The rows, their splits and
the bytes of the shards are those of the local engine.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import object_store, plugins, progress
from components.config import DataConfig
from components.external import data_files
from components.ingest import find_inputs, read_rows, read_source, write_batches
from components.ingest.rows import Rows, Share
from components.ingest.sources import find_files
from components.ingest.sources.parts import PARTS
from components.spark import check_seen, connected, run_tasks, shared_folder

_TASKS_PER_CORE = 4  # so that a slow one keeps few others waiting


def read_on_spark(rows: Rows, config: DataConfig, scratch: Path) -> list[str]:
    """Read the source into `rows`, as far as they have room.

    Args:
        rows: Takes the shares.
        config: Source, limit, Spark.
        scratch: Where tasks write their shares; driver and executors see it under the same path.

    Returns:
        What the source told of.

    Raises:
        ConfigError: as `ingest`; or Spark does not start, or its executors do not see the folder.
        DataError: as `ingest`; or a task died in each of its attempts.
    """
    source = plugins.resolve(config.source, plugins.SOURCES, "data.source")
    plugins.check_arguments(source, config.args, f"data.args of source '{config.source}'", path=config.path)
    inputs = find_inputs(rows, config)
    files: list[str] = []
    if [each.split for each in inputs] == [None] and not rows.needs_times:
        config = config.model_copy(update={"path": inputs[0].path})
        files = _files(config, takes_files="files" in inspect.signature(source).parameters)
    folder = shared_folder(scratch / "shares")
    is_own = plugins.is_own(config.source)
    with connected(config.spark) as session:
        cores = session.sparkContext.defaultParallelism
        if len(files) > 1:
            groups = _groups(files, cores * _TASKS_PER_CORE)
            types = None if is_own else _types(session, config, groups)
            work = _Encode(config, folder, len(groups), groups, types)
        else:
            work = _Encode(config, folder, 1 if is_own else cores)
        progress.report(f"encoding in {work.num_tasks} tasks of Spark")
        if is_own and work.num_tasks == 1:
            progress.report(f"source {config.source} is read by one task; several divide the files if it takes `files`")
        done = run_tasks(session, work, work.num_tasks, may_fail_by_chance=is_own)
    return rows.put_together([folder / name for _, name in done], [share for share, _ in done])


@dataclass(frozen=True)
class _Encode:
    """Encodes a share of the source in a task.

    Attributes:
        config: The source.
        folder: Where the share is written, under a name that no other attempt has.
        num_tasks: How many shares there are.
        groups: The files of each share; `None`: each takes every `num_tasks`-th batch.
        types: The types of all files, where tasks read the files of a built-in source.
    """

    config: DataConfig
    folder: Path
    num_tasks: int
    groups: Sequence[Sequence[str]] | None = None
    types: Any = None

    def __call__(self, number: int) -> tuple[Share, str]:
        check_seen(self.folder)
        out = self.folder / f"share-{number:05d}-{uuid.uuid4().hex}"
        out.mkdir()
        with tempfile.TemporaryDirectory(prefix="headrace-share-") as scratch:
            if self.groups is None:
                rows = Rows(out, self.config, number, self.num_tasks)
                warnings = read_rows(rows, self.config, Path(scratch))
            else:
                rows = Rows(out, self.config)
                warnings = self._read_files(rows, self.groups[number], Path(scratch))
        return rows.finish_share(warnings), out.name

    def _read_files(self, rows: Rows, files: Sequence[str], scratch: Path) -> list[str]:
        with _local(self.config, files, scratch) as local, progress.warnings_kept() as warnings:
            if self.types is None:
                write_batches(rows, read_source(self.config, local))
            else:
                write_batches(rows, PARTS[self.config.source].read(local, self.types, **self.config.args))
            return warnings


@dataclass(frozen=True)
class _FindTypes:
    """Finds out, in a task, what some files say of the types."""

    config: DataConfig
    groups: Sequence[Sequence[str]]

    def __call__(self, number: int) -> Any:
        with (
            tempfile.TemporaryDirectory(prefix="headrace-types-") as scratch,
            _local(self.config, self.groups[number], Path(scratch)) as local,
        ):
            return PARTS[self.config.source].types(local, **self.config.args)


def _types(session: Any, config: DataConfig, groups: Sequence[Sequence[str]]) -> Any:
    """The types of all files: put together from those of each group, or else, where they disagree, seen in one task."""
    found = run_tasks(session, _FindTypes(config, groups), len(groups))
    types = PARTS[config.source].together(found)
    if types is not None:
        return types
    progress.report("the files differ in types, so one task looks at all of them")
    return run_tasks(session, _FindTypes(config, [[file for group in groups for file in group]]), 1)[0]


def _files(config: DataConfig, *, takes_files: bool) -> list[str]:
    """The files, or URIs, that tasks may read apart; none where each task reads the whole source."""
    if plugins.is_own(config.source):
        if not takes_files or config.path is None or object_store.is_remote(config.path):
            return []
    elif config.source not in PARTS:
        return []
    if object_store.is_uri(config.path):
        return object_store.data_uris(config)
    if object_store.is_remote(config.path):
        return []
    return [str(file.absolute()) for file in find_files(config.path)]


def _groups(files: Sequence[str], most: int) -> list[list[str]]:
    """At most so many groups of neighbours, as even as can be."""
    number = min(len(files), most)
    ends = [len(files) * each // number for each in range(number + 1)]
    return [list(files[start:end]) for start, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def _local(config: DataConfig, files: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
    """The files on this machine: objects of a store are copied, and go with `scratch`."""
    if not object_store.is_remote(config.path):
        yield [Path(file) for file in files]
        return
    with contextlib.ExitStack() as stack:
        local: list[Path] = []
        for number, uri in enumerate(files):
            of_one = config.model_copy(update={"path": uri})
            copy = stack.enter_context(object_store.local_data(of_one, scratch / str(number)))
            local += data_files(str(copy.path))
        yield local
