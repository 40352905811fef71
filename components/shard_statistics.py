"""Statistics of examples: of each shard by itself, then merged in the order of the shards, here or on Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.config import ValidateConfig
from components.examples import SPLITS, ExamplesInfo, read_shard, shard_files
from components.spark import check_seen, connected, run_tasks, shared_folder
from components.statistics import StatisticsBuilder


def build_statistics(
    examples: Path, info: ExamplesInfo, config: ValidateConfig, scratch: Path
) -> dict[str, StatisticsBuilder]:
    """Statistics of each split and of its slices, the same to the bit whichever engine computes them.

    Args:
        examples: Artifact of `ingest`.
        info: What it holds.
        config: What is counted, and the engine.
        scratch: Where tasks of Spark leave what they counted; driver and executors see it under the same path.

    Raises:
        ConfigError: Spark does not start, or its executors do not see the folder.
        DataError: a shard is damaged, or a row has no weight.
    """
    shards = [(split, file.absolute()) for split in SPLITS for file in shard_files(examples, split)]
    of_shard = _OfShard([file for _, file in shards], info, config)
    states = _on_spark(of_shard, config, scratch) if config.engine == "spark" else map(of_shard, range(len(shards)))
    builders: dict[str, StatisticsBuilder] = {}
    for (split, _), state in zip(shards, states, strict=True):
        builder = StatisticsBuilder.from_bytes(state)
        if split in builders:
            builders[split].merge(builder)
        else:
            builders[split] = builder
    return builders


@dataclass(frozen=True)
class _OfShard:
    """Counts one shard, and gives the state of its builder."""

    files: list[Path]
    info: ExamplesInfo
    config: ValidateConfig

    def __call__(self, number: int) -> bytes:
        builder = StatisticsBuilder(
            self.info,
            text_features=self.config.text_features,
            max_top_values=self.config.max_top_values,
            num_quantiles=self.config.num_quantiles,
            needs=self.config.needs,
            weight=self.config.weight_feature,
            slices=self.config.slice_features,
        )
        for batch in read_shard(self.files[number], self.info):
            builder.update(batch)
        return builder.to_bytes()


@dataclass(frozen=True)
class _ToFile:
    """Counts one shard in a task: a state may be large, and goes past Spark under a name that no other attempt has."""

    of_shard: _OfShard
    folder: Path

    def __call__(self, number: int) -> str:
        check_seen(self.folder)
        file = self.folder / f"{number:05d}-{uuid.uuid4().hex}"
        file.write_bytes(self.of_shard(number))
        return file.name


def _on_spark(of_shard: _OfShard, config: ValidateConfig, scratch: Path) -> Iterator[bytes]:
    folder = shared_folder(scratch / "statistics")
    with connected(config.spark) as session:
        names = run_tasks(session, _ToFile(of_shard, folder), len(of_shard.files))
    for name in names:
        yield (folder / name).read_bytes()
