"""push: a blessed and proven model is put where TF Serving reads it, with the forms that passed."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from components import formats, lineage
from components.config import CardConfig, PushConfig, RegistryConfig
from components.errors import ArtifactError, HeadraceError, NotBlessedError
from tests.components.exports import copy_of
from tests.components.hub import Hub, serving
from tests.conftest import StepRun


def push(
    taxi: StepRun, path: Path, destination: Path, keep: int = 2, registry: RegistryConfig | None = None, **changed: Path
) -> Any:
    inputs = {name: changed.get(name, taxi.path(name)) for name in ("model", "evaluation", "exported", "proof")}
    config = PushConfig(
        destination=str(destination),
        name="taxi",
        keep_versions=keep,
        resolved_config="name: taxi\n",
        card=CardConfig(intended_use="Tips."),
        registry=registry,
    )
    return taxi.call("push", path, config, **inputs)


def test_push_writes_a_version_that_tf_serving_reads_and_does_it_once(taxi: StepRun, tmp_path: Path) -> None:
    result = push(taxi, tmp_path / "pushed", tmp_path / "served")
    version = tmp_path / "served" / "taxi" / "1"
    assert (result.version, result.version_path, result.rollback_version) == (1, str(version), None)
    assert sorted(p.name for p in version.iterdir() if p.name != "fingerprint.pb") == [
        "assets",
        "assets.extra",
        "onnx",
        "saved_model.pb",
        "tflite",
        "variables",
    ]
    assert (version / "assets.extra" / "config.yaml").read_text() == "name: taxi\n"
    assert "serving_default" in tf.saved_model.load(str(version)).signatures
    again = push(taxi, tmp_path / "again", tmp_path / "served")
    assert again.version == 1
    assert [p.name for p in (tmp_path / "served" / "taxi").iterdir()] == ["1"]


@pytest.fixture(scope="module")
def left_out(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proof in which a TFLite file failed."""

    def fail(path: Path) -> None:
        proof = json.loads((path / "proof.json").read_text())
        (row,) = (row for row in proof["formats"] if row["format"] == "tflite_float16")
        row |= {"passed": False, "reason": "auc drop is 0.3, at most 0.01 allowed"}
        (path / "proof.json").write_text(json.dumps(proof))

    return copy_of(taxi.path("proof"), tmp_path_factory.mktemp("left_out") / "proof", fail)


def test_push_leaves_out_what_failed_and_says_so(taxi: StepRun, left_out: Path, tmp_path: Path) -> None:
    result = push(taxi, tmp_path / "pushed", tmp_path / "served", proof=left_out)
    assert result.left_out == {"tflite_float16": "auc drop is 0.3, at most 0.01 allowed"}
    names = list(taxi.result("export").formats)
    assert result.formats == [name for name in names if name != "tflite_float16"]
    version = Path(result.version_path)
    listed = json.loads((version / "assets.extra/formats.json").read_text())
    assert [form["name"] for form in listed] == result.formats
    files = {form["path"] for form in listed if form["name"] != "saved_model"}
    assert {
        str(file.relative_to(version)) for kind in ("tflite", "onnx") for file in (version / kind).iterdir()
    } == files
    assert json.loads((tmp_path / "pushed/pushed.json").read_text())["left_out"] == result.left_out


def test_the_same_export_with_other_forms_is_another_version(taxi: StepRun, left_out: Path, tmp_path: Path) -> None:
    versions = [
        push(taxi, tmp_path / f"pushed_{number}", tmp_path / "served", **proof).version
        for number, proof in enumerate(({"proof": left_out}, {}, {}, {"proof": left_out}))
    ]
    assert versions == [1, 2, 2, 3]


def test_push_takes_only_what_the_proof_speaks_of(taxi: StepRun, tmp_path: Path) -> None:
    def forget(name: str) -> Any:
        def change(path: Path) -> None:
            proof = json.loads((path / "proof.json").read_text())
            proof["formats"] = [row for row in proof["formats"] if row["format"] != name]
            (path / "proof.json").write_text(json.dumps(proof))

        return change

    proof = copy_of(taxi.path("proof"), tmp_path / "onnx", forget("onnx"))
    assert push(taxi, tmp_path / "a", tmp_path / "served", proof=proof).left_out == {"onnx": "not verified"}
    proof = copy_of(taxi.path("proof"), tmp_path / "saved_model", forget("saved_model"))
    with pytest.raises(ArtifactError, match="The SavedModel is not proven"):
        push(taxi, tmp_path / "b", tmp_path / "other", proof=proof)
    assert not (tmp_path / "other").exists()


def test_the_card_and_the_lineage_go_with_the_version(taxi: StepRun, tmp_path: Path) -> None:
    version = Path(push(taxi, tmp_path / "pushed", tmp_path / "served").version_path)
    events = json.loads((version / "assets.extra/lineage.json").read_text())
    assert [event["job"]["name"] for event in (events[0], events[-1])] == ["taxi.ingest", "taxi.push"]
    (data,) = events[0]["inputs"]
    assert data["name"] == taxi.config.data.path
    assert list(lineage.breaks(events)) == []
    (pushed,) = events[-1]["outputs"]
    assert (pushed["namespace"], pushed["name"]) == ("file", str(version))
    files = {str(file.relative_to(version)) for file in version.rglob("*") if file.is_file()}
    added = ("config.yaml", "formats.json", "headrace.json", "lineage.json", "model_card.html", "model_card.md")
    assert set(pushed["facets"]["headrace_files"]["sha256"]) == files - {f"assets.extra/{name}" for name in added}
    assert list(lineage.changed_files(version, events)) == []
    card = (version / "assets.extra/model_card.md").read_text()
    assert "**Intended use**: Tips." in card.splitlines()
    assert f"| test | {taxi.result('ingest').num_examples['test']:,} |" in card.splitlines()
    assert "<h1>Model card: taxi</h1>" in (version / "assets.extra/model_card.html").read_text()
    for name in ("lineage.json", "model_card.md", "model_card.html"):
        assert (tmp_path / "pushed" / name).read_text() == (version / "assets.extra" / name).read_text()


def uncompared(taxi: StepRun, path: Path) -> Path:
    """The evaluation, had no champion been asked for."""
    shutil.copytree(taxi.path("evaluation"), path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["made_from"]["config"]["champion"] = None
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_push_keeps_a_rollback_and_forgets_the_oldest(taxi: StepRun, tmp_path: Path) -> None:
    base = tmp_path / "served" / "taxi"
    for number in (3, 8, 11):
        (base / str(number)).mkdir(parents=True)
        (base / str(number) / "saved_model.pb").write_bytes(b"another")
    evaluation = uncompared(taxi, tmp_path / "evaluation")
    result = push(taxi, tmp_path / "pushed", tmp_path / "served", evaluation=evaluation)
    assert (result.version, result.rollback_version) == (12, 11)
    assert sorted(p.name for p in base.iterdir()) == ["11", "12"]


def test_push_refuses_a_model_that_is_not_blessed(taxi: StepRun, tmp_path: Path) -> None:
    from components.config import EvaluateConfig

    strict = EvaluateConfig.model_validate({"thresholds": [{"metric": "auc", "min": 0.9999}]})
    taxi.call("evaluate", tmp_path / "evaluation", strict)
    with pytest.raises(NotBlessedError, match="failed: test auc"):
        push(taxi, tmp_path / "pushed", tmp_path / "served", evaluation=tmp_path / "evaluation")
    assert not (tmp_path / "served").exists()
    assert NotBlessedError.exit_code == 3


def test_push_refuses_a_blessing_that_was_won_against_another_champion(taxi: StepRun, tmp_path: Path) -> None:
    """Two runs are blessed beside the same champion; the second to push has not been compared with the first."""
    base = tmp_path / "served" / "taxi"
    (base / "4").mkdir(parents=True)
    (base / "4" / "saved_model.pb").write_bytes(b"pushed meanwhile")
    with pytest.raises(
        ArtifactError, match=rf"The champion is another one \({base}/4\) than the model was compared with"
    ):
        push(taxi, tmp_path / "pushed", tmp_path / "served")
    assert [p.name for p in base.iterdir()] == ["4"]
    assert not (tmp_path / "pushed").exists()


def test_a_version_without_its_graph_is_no_champion(taxi: StepRun, tmp_path: Path) -> None:
    (tmp_path / "served/taxi/4/variables").mkdir(parents=True)
    assert push(taxi, tmp_path / "pushed", tmp_path / "served").version == 5


def test_two_pushes_of_one_export_at_a_time_make_one_version(taxi: StepRun, tmp_path: Path) -> None:
    for name in ("model", "evaluation", "exported", "proof"):
        taxi.path(name)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: push(taxi, tmp_path / f"pushed_{n}", tmp_path / "served"), range(4)))
    assert [result.version for result in results] == [1] * 4
    assert [p.name for p in (tmp_path / "served/taxi").iterdir()] == ["1"]


def test_a_pushed_version_is_recorded_in_the_registry(taxi: StepRun, tmp_path: Path) -> None:
    hub = Hub()
    with serving(hub) as url:
        registry = RegistryConfig(url=url)
        hub.faults = [500]
        with pytest.raises(HeadraceError, match="answered 500"):
            push(taxi, tmp_path / "pushed", tmp_path / "served", registry=registry)
        assert (tmp_path / "served/taxi/1/saved_model.pb").is_file()
        result = push(taxi, tmp_path / "pushed", tmp_path / "served", registry=registry)
        elsewhere = RegistryConfig(url=url, destination_uri="pvc://models/served")
        push(taxi, tmp_path / "again", tmp_path / "served", registry=elsewhere)
    assert result.version == 1
    version = hub.resources["model_version"][result.registry_version_id]
    properties = {
        name: next(value for key, value in each.items() if key != "metadataType")
        for name, each in version["customProperties"].items()
    }
    assert properties["test_auc"] == taxi.result("evaluate").metrics["test"]["auc"]
    assert len(properties["data_fingerprint"]) == len(properties["model_digest"]) == 64
    uris = [artifact["uri"] for artifact in hub.resources["model_artifact"].values()]
    assert uris == [f"file://{tmp_path}/served/taxi/1", "pvc://models/served/taxi/1"]


def test_push_refuses_a_proof_of_another_export(taxi: StepRun, tmp_path: Path) -> None:
    def change(path: Path) -> None:
        (path / "saved_model" / "assets.extra" / "labels.txt").write_text("yes\nno\n")

    exported = copy_of(taxi.path("exported"), tmp_path / "exported", change)
    with pytest.raises(ArtifactError, match="The proof was made from another model than the one to push"):
        push(taxi, tmp_path / "pushed", tmp_path / "served", exported=exported)
    assert not (tmp_path / "served").exists()


def test_a_push_that_fails_in_the_middle_leaves_nothing_that_is_served(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copy2

    def fail_at_the_graph(source: Any, target: Any, **options: Any) -> Any:
        if str(target).endswith("saved_model.pb") and "served" in str(target):
            raise OSError(28, "No space left on device")
        return copied(source, target, **options)

    monkeypatch.setattr(shutil, "copy2", fail_at_the_graph)
    with pytest.raises(ArtifactError, match="No space left on the disk"):
        push(taxi, tmp_path / "pushed", tmp_path / "served")
    assert list((tmp_path / "served" / "taxi").iterdir()) == []
    assert not (tmp_path / "pushed").exists()


def test_a_form_is_its_file_with_what_is_named_like_it_or_its_folder(tmp_path: Path) -> None:
    for name in ("a/model.xml", "a/model.bin", "a/model_int8.xml", "a/model_int8.bin", "b/x/weights", "b/graph"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
    files = {path: formats.files_of(tmp_path / path) for path in ("a/model.xml", "b")}
    assert files == {
        "a/model.xml": [tmp_path / "a/model.bin", tmp_path / "a/model.xml"],
        "b": [tmp_path / "b/graph", tmp_path / "b/x/weights"],
    }
    assert formats.size_bytes(tmp_path / "b") == 2000
    assert 0 < formats.zipped_bytes(tmp_path / "b") < 100
