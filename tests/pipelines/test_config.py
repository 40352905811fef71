"""Reading a config: sources and their order, every error with its place, the resolved form, the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config import SECTIONS, Section, inherited_fields
from components.errors import ConfigError
from pipelines import config as config_module
from pipelines import yaml_text
from pipelines.config import PipelineConfig, golden_files, json_schema, load_config, resolved, split_arguments

PROJECT = Path(__file__).resolve().parents[2]
HEAD = """\
name: tiny
data: {path: data.csv, task: binary}
evaluate:
  thresholds:
  - {metric: auc, min: 0.5}
"""


def load(folder: Path, text: str, *overrides: str) -> PipelineConfig:
    file = folder / "c.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """What is wrong, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    head, *lines = str(caught.value).replace(f"{folder}/", "").split("\n  ")
    assert head.startswith("The configuration has ")
    return lines


def failure(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


def test_later_sources_win(tmp_path: Path) -> None:
    assert load(tmp_path, HEAD).train.epochs == 10
    text = HEAD + "train: {epochs: 20}\n"
    assert load(tmp_path, text).train.epochs == 20
    assert load(tmp_path, text, "train.epochs=30").train.epochs == 30
    assert load(tmp_path, text, "train.epochs=30", "train.epochs=40").train.epochs == 40


def test_overrides_reach_everywhere(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        HEAD,
        "name=other",
        "train.optimizer.learning_rate=1e-2",
        "evaluate.thresholds.0.min=0.9",
        "transform.features.fare.op=bucketize",
        "transform.features.fare.num_buckets=4",
        "export.formats=[onnx]",
        "model.args={widths: [8, 4]}",
        "train.early_stopping.patience=2",
        "data.label=a=b",
        "data.path=",
    )
    assert config.name == "other"
    assert config.train.optimizer.learning_rate == 0.01
    assert config.evaluate.thresholds[0].min == 0.9
    assert config.evaluate.thresholds[0].metric == "auc"
    fare = config.transform.features["fare"]
    assert fare.model_dump() == {"op": "bucketize", "input": None, "num_buckets": 4, "boundaries": []}
    assert config.export.formats == ["onnx"]
    assert config.model.args == {"widths": [8, 4]}
    assert config.train.early_stopping is not None
    assert config.train.early_stopping.patience == 2
    assert config.data.label == "a=b"
    assert config.data.path is None


def test_values_mean_what_yaml_1_2_says(tmp_path: Path) -> None:
    text = HEAD + "train: {xla: on}\nmodel: {args: {a: 1e-3, b: 010, c: 2024-01-01, d: 1:30, e: no, f: 20_000, g: ~}}\n"
    config = load(tmp_path, text)
    assert config.train.xla == "on"
    expected = {"a": 0.001, "b": 10, "c": "2024-01-01", "d": "1:30", "e": "no", "f": 20000, "g": None}
    assert config.model.args == expected
    assert load(tmp_path, resolved(config)).model.args == expected


def test_merge_keys_and_empty_sections_are_fine(tmp_path: Path) -> None:
    features = "transform:\n  features:\n    a: &b {op: bucketize, num_buckets: 3}\n    c: {<<: *b, num_buckets: 5}\n"
    config = load(tmp_path, HEAD + features + "train:\n  # epochs: 3\n")
    assert config.transform.features["c"].model_dump()["num_buckets"] == 5
    assert config.train.epochs == 10


WRONG = [
    ("train:\n  epocs: 3\n", "c.yaml:7: train.epocs: there is no such key. Did you mean 'epochs'?"),
    ("trian: {}\n", "c.yaml:6: trian: there is no such key. Did you mean 'train'?"),
    (
        "train: {learning_rate: 0.1}\n",
        "c.yaml:6: train.learning_rate: there is no such key. Did you mean 'train.optimizer.learning_rate'?",
    ),
    (
        "train: {zzz: 1}\n",
        "c.yaml:6: train.zzz: there is no such key. Known: augment, callbacks, checkpoint_steps, class_weights, ",
    ),
    (
        "optimize: {stages: [{method: prun}]}\n",
        "c.yaml:6: optimize.stages.0.method: 'prun' is none of: distill, prune, cluster, quantize_aware. Did you mean",
    ),
    (
        "optimize: {stages: [{method: prune, sparsty: 0.4}]}\n",
        "c.yaml:6: optimize.stages.0.sparsty: there is no such key. Did you mean 'sparsity'",
    ),
    (
        "optimize: {stages: [{method: cluster, num_clusters: 1}]}\n",
        "c.yaml:6: optimize.stages.0.num_clusters: expected greater than or equal to 2; received 1",
    ),
    (
        "compress: {num_calibration_examples: 9}\n",
        "c.yaml:6: compress.num_calibration_examples: this is now 'compress.calibration.num_examples'",
    ),
    ("compress: {metric: auc}\n", "c.yaml:6: compress.metric: this is now 'verify.metric'"),
    ("compress: {max_drop: 0.1}\n", "c.yaml:6: compress.max_drop: this is now 'verify.inexact.max_drop'"),
    (
        "verify: {max_abs_difference: 0.1}\n",
        "c.yaml:6: verify.max_abs_difference: this is now 'verify.exact.max_abs_difference'",
    ),
    (
        "verify:\n  limits:\n    onnx: {max_dropp: 0.1}\n",
        "c.yaml:8: verify.limits.onnx.max_dropp: there is no such key. Did you mean 'max_drop'?",
    ),
    (
        "verify: {limits: {saved_model: {on_failure: omit}}}\n",
        "c.yaml:6: verify: the SavedModel cannot be left out: leave out limits.saved_model.on_failure",
    ),
    ("train: {epochs: 0}\n", "c.yaml:6: train.epochs: expected greater than or equal to 1; received 0"),
    ("train: {epochs: many}\n", "c.yaml:6: train.epochs: expected a valid integer, "),
    (
        "train: {precision: float23}\n",
        "c.yaml:6: train.precision: 'float23' is none of: float32, mixed_bfloat16, mixed_float16. Did you mean "
        "'float32'?",
    ),
    (
        "transform:\n  features:\n    fare:\n      op: bucketise\n",
        "c.yaml:9: transform.features.fare.op: 'bucketise' is none of: normalize, min_max, robust, log, impute, "
        "bucketize, vocabulary, hash, cross, text, date, image. Did you mean 'bucketize'?",
    ),
    (
        "transform:\n  features:\n    fare: {op: bucketize, num_bucket: 3}\n",
        "c.yaml:8: transform.features.fare.num_bucket: there is no such key. Did you mean 'num_buckets'?",
    ),
    (
        "transform:\n  features:\n    text: {op: text, text: 3}\n",
        "c.yaml:8: transform.features.text.text: there is no such key.",
    ),
    (
        "transform:\n  features:\n    fare: {}\n",
        "c.yaml:8: transform.features.fare: 'op' is missing, one of: normalize, min_max, robust, log, impute, "
        "bucketize, vocabulary, hash, cross, text, date, image",
    ),
    (
        "transform:\n  features:\n    hashed: {op: hash}\n",
        "c.yaml:8: transform.features.hashed.num_bins: this is required",
    ),
    (
        "transform:\n  features:\n    1: {op: text}\n",
        "c.yaml:8: transform.features.1: expected a valid string; received 1",
    ),
    (
        "export: {formats: [onnx, tflit]}\n",
        "c.yaml:6: export.formats.1: 'tflit' is none of: tflite, onnx, openvino, coreml, tensorrt.",
    ),
    ("push: 3\n", "c.yaml:6: push: expected a section with keys from: destination, keep_versions; received 3"),
    ("train: {seed: 3}\n", "c.yaml:6: train.seed: this is set at the top of the file: write 'seed:' there"),
    (
        "train: {optimizer: {weight_decay: 0.1}}\n",
        "c.yaml:6: train.optimizer: adam has no weight_decay; use name: adamw",
    ),
    (
        "train:\n  callbacks:\n  - {name: CSVLogger}\n  - {name: ReduceLROnPlato}\n",
        "c.yaml:9: train.callbacks.1.name: there is no 'ReduceLROnPlato'. Did you mean 'ReduceLROnPlateau'?",
    ),
    (
        "train:\n  callbacks:\n  - {name: BackupAndRestore}\n",
        "c.yaml:8: train.callbacks.0.name: BackupAndRestore is not for here: training resumes by itself",
    ),
    ("train: {callbacks: [{name: 'my.own:'}]}\n", "c.yaml:6: train.callbacks.0.name: 'my.own:' is not an import path."),
    (
        "train: {callbacks: [CSVLogger]}\n",
        "c.yaml:6: train.callbacks.0: expected a section with keys from: name, args; ",
    ),
    (
        "train: {optimizer: {layers: [{match: a}]}}\n",
        "c.yaml:6: train.optimizer.layers.0.learning_rate_factor: this is required and not set: Times the learning rate",
    ),
    ("train: {label_smoothing: .nan}\n", "c.yaml:6: train.label_smoothing: nan is not a finite number"),
    ("model: {args: {rate: .inf}}\n", "c.yaml:6: model.args.rate: inf is not a finite number"),
    ("model:\n  name: tabluar\n", "c.yaml:7: model.name: there is no 'tabluar'. Did you mean 'tabular'?"),
    ("model: {name: 'my.nets:'}\n", "c.yaml:6: model.name: 'my.nets:' is not an import path."),
    ("train: {epochs: 3}\ntrain: {epochs: 4}\n", "c.yaml:7: train: this key is set on line 6, too"),
    ("seed: 3\nname: 5\n", "c.yaml:7: name: this key is set on line 1, too"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_each_error_says_where_what_and_what_instead(tmp_path: Path, text: str, expected: str) -> None:
    lines = problems(tmp_path, HEAD + text)
    assert lines[0].startswith(expected)
    assert len(lines) == (2 if "name: 5" in text else 1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epocs=3", "override 'train.epocs=3': train.epocs: there is no such key. Did you mean 'epochs'?"),
        ("train.epochs=0", "override 'train.epochs=0': train.epochs: expected greater than or equal to 1; received 0"),
        ("train={epochs: 0}", "override 'train={epochs: 0}': train.epochs: expected greater"),
        ("train.epochs", "override 'train.epochs': is not section.key=value, as in train.epochs=3"),
        ("train..epochs=1", "override 'train..epochs=1': is not section.key=value"),
        ("train.epochs=[1", "override 'train.epochs=[1': its value is not YAML: "),
        (
            "evaluate.thresholds.3.min=1",
            "override 'evaluate.thresholds.3.min=1': evaluate.thresholds is a list without an item '3': "
            "its items are 0 to 0",
        ),
        ("name.x=1", "override 'name.x=1': name is 'tiny', which has no 'x' inside"),
        ("data.source=csvv", "override 'data.source=csvv': data.source: there is no 'csvv'. Did you mean 'csv'?"),
    ],
)
def test_errors_in_overrides_name_the_override(tmp_path: Path, override: str, expected: str) -> None:
    (line,) = problems(tmp_path, HEAD, override)
    assert line.startswith(expected)


def test_what_only_classes_can_have_is_refused_for_a_regression(tmp_path: Path) -> None:
    regression = HEAD.replace("binary", "regression").replace("auc", "rmse")
    assert problems(tmp_path, regression + "train:\n  class_weights: balanced\n", "train.label_smoothing=0.1") == [
        "c.yaml:7: train.class_weights: a regression task has no classes: leave it out, received 'balanced'",
        "override 'train.label_smoothing=0.1': train.label_smoothing: a regression task has no classes: leave it out, "
        "received 0.1",
    ]
    config = load(tmp_path, regression + "train: {class_weights: none, label_smoothing: 0.0}\n")
    assert load(tmp_path, resolved(config)) == config
    assert load(tmp_path, HEAD, "train.class_weights=balanced").train.class_weights == "balanced"


def test_an_override_of_a_section_hides_the_lines_of_the_file(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, HEAD + "train: {epochs: 3}\n", "train={epochs: 0}")
    assert line.startswith("override 'train={epochs: 0}': train.epochs: expected greater")


def test_a_missing_section_is_required(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: x\ndata: {label: 3}\n") == [
        "c.yaml: evaluate: this is required and not set",
        "c.yaml:2: data.label: expected a valid string; received 3: write it in quotes",
    ]


def test_every_problem_is_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    texts = [text for text, _ in WRONG if text in ("push: 3\n", "trian: {}\n", "export: {formats: [onnx, tflit]}\n")]
    lines = problems(tmp_path, HEAD + "".join(texts), "x", "verify.num_server_examples=0")
    assert [line.split(": ")[0] for line in lines] == [
        "c.yaml:6",
        "c.yaml:7",
        "c.yaml:8",
        "override 'x'",
        "override 'verify.num_server_examples=0'",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "c.yaml is empty. It needs at least: name, data, evaluate."),
        ("# nothing\n", "c.yaml is empty."),
        ("- a\n- b\n", "c.yaml:1: expected `key: value` lines, received a list."),
        ("hello\n", "c.yaml:1: expected `key: value` lines, received a single value."),
        ("name: x\ndata: [1\n", "c.yaml:3: this is not YAML: "),
        ("name: x\n\tdata: 3\n", "c.yaml:2: this is not YAML: "),
        ("name: x\n---\nname: y\n", "c.yaml:2: this is not YAML: expected a single document"),
        ("name: *missing\n", "c.yaml:1: this is not YAML: found undefined alias"),
        ("name: !!python/object:os.system x\n", "c.yaml:1: this is not YAML: could not determine a constructor"),
        ("? [a]\n: b\n", "c.yaml:1: this is not YAML: "),
        ("name: &a {b: *a}\n", "c.yaml:1: this is not YAML: an alias contains itself"),
        ("name: \x00\n", "c.yaml: this is not YAML: "),
    ],
)
def test_what_is_no_config_at_all(tmp_path: Path, text: str, expected: str) -> None:
    assert failure(tmp_path, text).startswith(expected)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "taxi.yaml").write_text(HEAD)
    with pytest.raises(ConfigError, match=re.escape(f"There is no config {tmp_path}/taxy.yaml. Did you mean")):
        load_config(tmp_path / "taxy.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9t\xe9\n")
    with pytest.raises(ConfigError, match=r"is not text in UTF-8: .* at byte 6"):
        load_config(tmp_path / "latin.yaml")


def test_arguments_are_a_config_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_module, "_PROJECT", tmp_path / "elsewhere")
    assert split_arguments(["a.yaml", "seed=3"]) == (Path("a.yaml"), ["seed=3"])
    Path("a=b.yaml").write_text(HEAD)
    assert split_arguments(["a=b.yaml"]) == (Path("a=b.yaml"), [])
    with pytest.raises(ConfigError, match=r"Expected section.key=value after the config, received 'b.yaml'"):
        split_arguments(["a.yaml", "b.yaml"])
    with pytest.raises(ConfigError, match=r"No config was given and there is no configs/chicago_taxi.yaml here"):
        split_arguments(["seed=3"])
    installed = tmp_path / "elsewhere/configs/chicago_taxi.yaml"
    installed.parent.mkdir(parents=True)
    installed.write_text(HEAD)
    assert split_arguments(["seed=3"]) == (installed, ["seed=3"])
    Path("configs").mkdir()
    Path("configs/own.yaml").write_text(HEAD)
    assert split_arguments([]) == (Path("configs/own.yaml"), [])
    Path("configs/quick.yaml").write_text(HEAD)
    with pytest.raises(ConfigError, match=r"several here. Give one of configs/own.yaml, configs/quick.yaml"):
        split_arguments([])
    Path("configs/chicago_taxi.yaml").write_text(HEAD)
    assert split_arguments([]) == (Path("configs/chicago_taxi.yaml"), [])


def test_resolved_has_every_setting_reads_back_and_leaves_out_what_is_inherited(tmp_path: Path) -> None:
    config = load(tmp_path, HEAD, "transform.features.fare.op=normalize", "train.xla=on", "data.label='1e-3'")
    text = resolved(config)
    assert load(tmp_path, text) == config
    tree = yaml.safe_load(text)
    assert list(tree)[:4] == ["name", "seed", "data", "validate"]
    assert tree["train"]["xla"] == "on"
    assert tree["data"]["label"] == "1e-3"
    for section, cls in SECTIONS.items():
        assert not set(inherited_fields(cls)) & set(tree[section])
        assert set(tree[section]) | set(inherited_fields(cls)) == set(cls.model_fields)


def test_inherited_settings_reach_their_steps(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        HEAD,
        "seed=7",
        "transform.features.words={op: text, input: body}",
        "push.destination=d",
        "deploy.manifests=m",
    )
    assert config.step_config("train").seed == 7
    assert config.step_config("train").model == config.model
    assert config.step_config("validate").text_features == ["body"]
    assert config.step_config("evaluate").champion_path == "d/tiny"
    assert config.step_config("push").name == "tiny"
    assert config.step_config("push").manifests == config.step_config("evaluate").manifests == "m"
    for section, cls in SECTIONS.items():
        config.step_config(section)
        for field in inherited_fields(cls):
            with pytest.raises(ConfigError, match=f"{section}.{field}: this is set at the top"):
                load(tmp_path, HEAD, f"{section}.{field}=x")


def test_tracking_may_be_its_kind_alone(tmp_path: Path) -> None:
    short = load(tmp_path, HEAD, "tracking=mlflow")
    assert short == load(tmp_path, HEAD + "tracking: {kind: mlflow}\n") == load(tmp_path, resolved(short))
    assert load(tmp_path, HEAD + "tracking:\n").tracking is None
    assert {"const": "mlflow"} in json_schema()["properties"]["tracking"]["anyOf"]
    assert problems(tmp_path, HEAD, "tracking=mlfow") == [
        "override 'tracking=mlfow': tracking.kind: 'mlfow' is none of: mlflow. Did you mean 'mlflow'?"
    ]
    assert problems(tmp_path, HEAD + "tracking: {url: http://mlflow}\n") == [
        "c.yaml:6: tracking.url: there is no such key. Did you mean 'uri'?"
    ]


def test_card_and_registry_reach_the_step_that_writes_them(tmp_path: Path) -> None:
    text = HEAD + "card: {caveats: Chicago only.}\nregistry: {url: http://hub:8080/}\n"
    push = load(tmp_path, text).step_config("push")
    assert (push.card.caveats, push.registry.url) == ("Chicago only.", "http://hub:8080")
    assert problems(tmp_path, HEAD + "registry: {token_env: T}\n") == [
        "c.yaml:6: registry.url: this is required and not set: Its address, as in http://model-registry-service.kubeflow:8080"
    ]


def test_yaml_that_is_written_is_quoted_for_both_versions_of_yaml() -> None:
    texts = ["on", "yes", "1e-3", "010", "~", "", "2024-01-01", "1:30", "true", "é"]
    assert yaml_text.parse(yaml_text.dump(texts)) == texts
    assert yaml.safe_load(yaml_text.dump(texts)) == texts


CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
GOLDEN = ["configs/schema.json", *(f"tests/golden/{config.stem}.resolved.yaml" for config in CONFIGS)]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_up_to_date(name: str) -> None:
    expected = golden_files(PROJECT)[PROJECT / name]
    command = "python -m pipelines.config --write-golden"
    assert (PROJECT / name).is_file(), f"{name} is missing: {command}"
    assert (PROJECT / name).read_text() == expected, f"{name} is out of date: {command}"


def test_golden_folder_has_no_leftovers() -> None:
    assert {path.name for path in (PROJECT / "tests/golden").glob("*.resolved.yaml")} <= {
        Path(name).name for name in GOLDEN
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_name_their_schema_for_editors(path: Path) -> None:
    assert "# yaml-language-server: $schema=schema.json\n" in path.read_text()


def test_schema_has_every_key_of_a_file_and_none_that_is_inherited(tmp_path: Path) -> None:
    schema = json_schema()
    json.dumps(schema)
    tree = yaml.safe_load(resolved(load(tmp_path, HEAD, "transform.features.a={op: hash, num_bins: 3}")))
    assert set(schema["properties"]) == set(tree)
    for section, cls in SECTIONS.items():
        definition = schema["$defs"][cls.__name__]
        assert set(definition["properties"]) == set(tree[section])
        assert definition["additionalProperties"] is False
        assert definition["description"]
    for named in ("ModelConfig", "CallbackConfig"):
        assert "enum" in schema["$defs"][named]["properties"]["name"]["anyOf"][0]
    assert not list(_marks_of_inheritance(schema))


def _marks_of_inheritance(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if value.get("inherited"):
            yield value
        for inner in value.values():
            yield from _marks_of_inheritance(inner)


def test_every_section_is_in_the_tree() -> None:
    fields = {field.alias or name: field.annotation for name, field in PipelineConfig.model_fields.items()}
    sections = {name: cls for name, cls in fields.items() if isinstance(cls, type) and issubclass(cls, Section)}
    no_steps = ("model", "card", "kubeflow")
    assert {name: cls for name, cls in sections.items() if name not in no_steps} == SECTIONS
