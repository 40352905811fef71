"""Artifacts are complete or absent, and fingerprints change with what the output follows from."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from components import artifacts, external
from components.config import DataConfig, EvaluateConfig, Threshold, TrainConfig, TransformConfig, ValidateConfig
from components.errors import ArtifactError, ConfigError


@dataclass(frozen=True)
class Result:
    number: int


def write(path: Path, content: str = "content", config: ValidateConfig | None = None) -> None:
    with artifacts.writing(path, step="validate", inputs={}, config=config or ValidateConfig()) as out:
        (out.path / "folder").mkdir()
        (out.path / "folder" / "file.txt").write_text(content)
        out.result = Result(3)


def test_a_written_artifact_reads_back(tmp_path: Path) -> None:
    write(tmp_path / "a")
    manifest = artifacts.open_artifact(tmp_path / "a", step="validate")
    assert manifest.result == {"number": 3}
    assert manifest.files["folder/file.txt"]["size_bytes"] == len("content")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_artifact_knows_all_that_it_was_made_from(tmp_path: Path) -> None:
    def make(name: str, **inputs: Path) -> Path:
        with artifacts.writing(tmp_path / name, step=name, inputs=inputs, config=ValidateConfig()) as out:
            (out.path / "file").write_text(name)
            out.result = Result(len(inputs))
        return tmp_path / name

    examples = make("examples")
    model = make("model", examples=examples)
    known = artifacts.read_manifest(make("exported", model=model)).ancestors
    assert list(known) == ["examples", "model"]
    assert known["model"]["inputs"] == {"examples": artifacts.read_manifest(examples).digest}
    assert (known["examples"]["step"], known["examples"]["result"]) == ("examples", {"number": 0})
    # All settings but those that only say where a step runs.
    assert known["model"]["config"] == ValidateConfig().model_dump(exclude={"engine", "spark"})
    assert len(known["model"]["source"]) == 64
    # What is given is what counts, not what another input has seen of that name.
    before = known["examples"]["digest"]
    write(tmp_path / "examples", "others")
    both = artifacts.ancestors_of({"examples": tmp_path / "examples", "model": model})
    assert both["examples"]["digest"] == artifacts.read_manifest(tmp_path / "examples").digest != before


def test_same_content_same_digest_and_other_content_another(tmp_path: Path) -> None:
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        write(tmp_path / name, content)
    digests = [artifacts.read_manifest(tmp_path / name).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_an_error_leaves_the_old_artifact_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    with (
        pytest.raises(ZeroDivisionError),
        artifacts.writing(tmp_path / "a", step="validate", inputs={}, config=ValidateConfig()) as out,
    ):
        (out.path / "half").write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a" / "folder" / "file.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "manifest.json").unlink(), "is incomplete"),
        (lambda a: (a / "manifest.json").write_text("{"), "damaged manifest"),
        (lambda a: (a / "folder" / "file.txt").unlink(), "missing or has another size"),
        (lambda a: (a / "folder" / "file.txt").write_text("CONTENT"), "not what was written"),
        (lambda a: (a / "folder" / "file.txt").write_text("longer content"), "missing or has another size"),
        (lambda a: (a / "manifest.json").write_text('{"format_version": 99}'), "layout version 99"),
    ],
)
def test_a_damaged_artifact_is_refused(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        artifacts.open_artifact(tmp_path / "a", step="validate")


def test_an_absent_or_foreign_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        artifacts.open_artifact(tmp_path / "a", step="validate")
    write(tmp_path / "a")
    with pytest.raises(ArtifactError, match="made by step 'validate', expected one of 'train'"):
        artifacts.open_artifact(tmp_path / "a", step="train")


def test_a_killed_writer_leaves_nothing_that_reads_and_its_rubbish_is_cleared(tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from pathlib import Path
        from components import artifacts
        from components.config import ValidateConfig
        with artifacts.writing(Path({str(tmp_path / "a")!r}), step="validate", inputs={{}}, config=ValidateConfig()) as out:
            (out.path / "half").write_text("half")
            out.scratch.mkdir(parents=True)
            (out.scratch / "checkpoint").write_text("kept")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ArtifactError, match="does not exist"):
        artifacts.open_artifact(tmp_path / "a", step="validate")
    with artifacts.writing(tmp_path / "a", step="validate", inputs={}, config=ValidateConfig()) as out:
        assert (out.scratch / "checkpoint").read_text() == "kept"
        out.result = Result(1)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_scratch_of_another_fingerprint_is_not_seen(tmp_path: Path) -> None:
    scratches = []
    for config in (ValidateConfig(), ValidateConfig(min_class_examples=9)):
        with artifacts.writing(tmp_path / "a", step="validate", inputs={}, config=config) as out:
            scratches.append(out.scratch)
            out.result = Result(1)
    assert scratches[0] != scratches[1]


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ArtifactError, match="No space left on the disk while writing"),
        artifacts.writing(tmp_path / "a", step="validate", inputs={}, config=ValidateConfig()),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_parts_change_with_each_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(config: ValidateConfig, content: str = "x") -> dict:
        write(tmp_path / "input", content)
        return artifacts.make_fingerprint_parts(
            step="transform", inputs={"examples": tmp_path / "input"}, config=config
        )

    base = parts(TransformConfig())
    assert parts(TransformConfig()) == base
    assert parts(TransformConfig(), "y")["inputs"] != base["inputs"]
    assert parts(TransformConfig(features={"a": {"op": "normalize"}}))["config"] != base["config"]
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0")
    assert parts(TransformConfig())["versions"] != base["versions"]


def test_source_digests_follow_imports_and_change_with_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "my_nets"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text("from my_nets import blocks\nimport models.spec\n")
    (package / "blocks.py").write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = artifacts.source_digests(["my_nets.net"])
    assert {"my_nets.net", "my_nets.blocks", "models.spec"} <= set(before)
    (package / "blocks.py").write_text("WIDTH = 2\n")
    after = artifacts.source_digests(["my_nets.net"])
    assert {name for name in before if before[name] != after[name]} == {"my_nets.blocks"}


def test_the_modules_of_a_users_model_and_callbacks_are_part_of_training() -> None:
    callbacks = [{"name": "CSVLogger", "args": {"filename": "log.csv"}}, {"name": "my_callbacks.plots:make"}]
    config = TrainConfig.model_validate({"model": {"name": "my_nets:build"}, "callbacks": callbacks})
    modules = artifacts.step_modules("train", config.model_dump(mode="json"))
    assert modules == ["components.train", "my_nets", "keras.callbacks", "my_callbacks.plots"]


def test_a_change_in_a_users_callback_changes_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainConfig.model_validate({"callbacks": [{"name": "my_callback:make"}]})
    prints = []
    for source in ("A = 1\n", "A = 22\n"):
        (tmp_path / "my_callback.py").write_text(source)
        prints.append(artifacts.make_fingerprint_parts(step="train", inputs={}, config=config)["source"])
    assert {name for name in prints[0] if prints[0][name] != prints[1][name]} == {"my_callback"}
    assert not any(name.startswith("keras") for name in prints[0])


def test_source_digests_import_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from components.artifacts import source_digests; "
        "found = source_digests(['components.train']); "
        "assert 'components.train.engine' in found, found; "
        "assert 'components.train' not in sys.modules and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_champion_is_part_of_what_evaluation_follows_from(tmp_path: Path) -> None:
    write(tmp_path / "model")
    config = EvaluateConfig(thresholds=[Threshold(metric="auc", min=0.5)], champion_path=str(tmp_path / "served"))

    def outside() -> dict:
        return artifacts.make_fingerprint_parts(step="evaluate", inputs={"model": tmp_path / "model"}, config=config)[
            "outside"
        ]

    assert outside() == {"champion": None}
    version = tmp_path / "served" / "1"
    version.mkdir(parents=True)
    (version / "saved_model.pb").write_bytes(b"graph")
    assert outside()["champion"] is not None


def test_a_users_modules_count_wherever_they_lie_and_installed_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text("import json\nimport numpy\nimport of_the_system\nfrom my_layers import Gate\n")
    (tmp_path / "my_layers.py").write_text("Gate = 1\n")
    system = tmp_path / "usr/lib/python3/dist-packages"
    system.mkdir(parents=True)
    (system / "of_the_system.py").write_text("")
    monkeypatch.syspath_prepend(system)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(artifacts.source_digests(["my_net"])) == {"my_net", "my_layers"}


def test_a_module_that_is_no_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken.py").write_text("x = 1\ndef build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"my_broken\.py:2: invalid syntax"):
        artifacts.source_digests(["my_broken"])


def test_the_digest_of_a_folder_changes_when_a_file_changes_its_folder(tmp_path: Path) -> None:
    for folder in ("cats", "dogs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of_{folder}.jpg").write_text(folder)
    before = external.digest_data(str(tmp_path), "data.path")
    (tmp_path / "cats" / "of_cats.jpg").rename(tmp_path / "dogs" / "of_cats.jpg")
    relabelled = external.digest_data(str(tmp_path), "data.path")
    (tmp_path / "dogs").rename(tmp_path / "hounds")
    assert len({before, relabelled, external.digest_data(str(tmp_path), "data.path")}) == 3


def test_the_versions_of_a_steps_own_libraries_count() -> None:
    versions = artifacts.make_fingerprint_parts(step="verify", inputs={}, config=ValidateConfig())["versions"]
    assert {"onnxruntime", "ai-edge-litert", "tensorflow"} <= set(versions)


def test_a_source_that_reads_no_file_is_asked_again(tmp_path: Path) -> None:
    assert "is asked again" in (external.why_unknown("ingest", DataConfig(source="my_data:source")) or "")
    (tmp_path / "rows.db").write_text("rows")
    own_file = DataConfig(source="my_data:source", path=str(tmp_path / "rows.db"))
    assert external.why_unknown("ingest", own_file) is None
    assert external.why_unknown("ingest", DataConfig(source="fashion_mnist")) is None
