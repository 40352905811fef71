"""`headrace init`: the new project is whole, clean, tested, and its CI's lines run."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from components.errors import ArtifactError, ConfigError
from pipelines import init, local
from pipelines.cli import main
from pipelines.config import load_config

PROJECT = Path(__file__).resolve().parents[2]
GITHUB = ".github/workflows/ci.yml"
GITLAB = ".gitlab-ci.yml"
TASKS = get_args(init.Task)
FILES = {
    ".github/workflows/ci.yml",
    ".gitignore",
    ".gitlab-ci.yml",
    "Containerfile",
    "Makefile",
    "README.md",
    "configs/schema.json",
    "configs/tip-model.yaml",
    "data/README.md",
    "data/trips.csv",
    "pyproject.toml",
    "requirements.txt",
    "tests/conftest.py",
    "tests/test_data.py",
    "tests/test_model.py",
    "tests/test_pipeline.py",
    "tip_model/__init__.py",
    "tip_model/data.py",
    "tip_model/model.py",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "tip-model"
    init.create(folder)
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_every_file_is_there_with_every_placeholder_filled(project: Path) -> None:
    assert files_in(project) == FILES
    for name in FILES - {"configs/schema.json"}:
        text = (project / name).read_text()
        left = [
            word for word in ("project_name", "package_name", "headrace_version", "headrace_origin") if word in text
        ]
        assert left == [], name
    assert 'packages = ["tip_model"]' in (project / "pyproject.toml").read_text()
    assert f'"headrace=={init._version()}"' in (project / "pyproject.toml").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_the_config_of_each_task_loads(task: Any, tmp_path: Path) -> None:
    init.create(tmp_path / "a1", task=task)
    config = load_config(tmp_path / "a1/configs/a1.yaml")
    assert (config.name, config.data.task, config.model.name) == ("a1", task, "a1.model:build")


@pytest.mark.parametrize("name", ["a", "a-name-of-forty-characters-and-no-longer"])
def test_ruff_finds_nothing_whatever_the_name(name: str, tmp_path: Path) -> None:
    init.create(tmp_path / name)
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tmp_path / name,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_the_trips_are_rows_of_the_shipped_data() -> None:
    with gzip.open(PROJECT / "configs/data/chicago_taxi.csv.gz", "rt", newline="") as file:
        known = list(csv.DictReader(file))
    with (init.TEMPLATE / "data/trips.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: row[name] for name in rows[0]} for row in known[::6]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Demo", "'My Demo' cannot be the name of a project.* Did you mean 'my-demo'?"),
        ("2nd", "begins with a letter.* Did you mean 'nd'?"),
        ("a--b", "single - or _ between them"),
        ("é", "made of a-z, 0-9 and single - or _ between them, begins with a letter and has at most 40 characters.$"),
        ("a" * 41, "at most 40 characters"),
        ("class", "'class' is a word of Python"),
        ("json", "Python has a module 'json'. Choose another, such as 'json-model'"),
        ("models", "there is a module 'models' already, .*models/__init__.py"),
        ("tests", "its folder 'tests' is for something else"),
        ("runs", "its folder 'runs' is for something else"),
    ],
)
def test_names_that_cannot_be(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        init.create(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1/notes").write_text("mine")
    with pytest.raises(ConfigError, match="a1 is not empty: it holds notes"):
        init.create(tmp_path / "a1")
    with pytest.raises(ConfigError, match="notes is a file"):
        init.create(tmp_path / "a1/notes")
    assert files_in(tmp_path) == {"a1/notes"}
    (tmp_path / "a2").mkdir()
    monkeypatch.chdir(tmp_path / "a2")
    with pytest.raises(ConfigError, match="would replace the folder one is in"):
        init.create(Path())


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "a1").mkdir()
    init.create(tmp_path / "a1")
    assert (tmp_path / "a1/a1/model.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["a1"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name == "pyproject.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ArtifactError, match="No space left"):
        init.create(tmp_path / "a1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "file:///src/headrace", "dir_info": {"editable": True}}, "-e file:///src/headrace"),
        ({"url": "file:///src/headrace", "dir_info": {}}, "headrace @ file:///src/headrace"),
        (
            {"url": "https://git.example/headrace", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "headrace @ git+https://git.example/headrace@c0ffee",
        ),
        ({"url": "https://x.example/headrace.whl", "archive_info": {}}, "headrace @ https://x.example/headrace.whl"),
    ],
)
def test_headrace_is_required_from_where_it_came(origin: dict[str, Any], expected: str) -> None:
    assert init._requirement(origin) == expected


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["init", "sub/a1", "--task", "regression"])
    assert done.exit_code == 0, done.output
    assert f"Made sub/a1 with {len(FILES)} files" in done.output
    assert "cd sub/a1\n  make test" in done.output
    assert "task: regression" in Path("sub/a1/configs/a1.yaml").read_text()
    again = CliRunner().invoke(main, ["init", "sub/a1"])
    assert again.exit_code == 2
    assert "Error: " in again.output and "is not empty" in again.output


@pytest.mark.parametrize(
    ("name", "schema", "right", "wrong"),
    [
        (GITHUB, "vendor.github-workflows", "runs-on: ubuntu-latest", "run-on: ubuntu-latest"),
        (GITLAB, "vendor.gitlab-ci", "paths: [build/pipeline.yaml]", "path: [build/pipeline.yaml]"),
    ],
)
def test_ci_files_follow_their_schemas(
    name: str, schema: str, right: str, wrong: str, project: Path, tmp_path: Path
) -> None:
    text = (project / name).read_text()
    for file, content in ((tmp_path / "right.yml", text), (tmp_path / "wrong.yml", text.replace(right, wrong, 1))):
        file.write_text(content)
        command = ["-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        assert (done.returncode == 0) == (file.stem == "right"), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_config_of_each_task_gives_a_model_that_is_pushed(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"init-{task}"  # A name for each: modules stay imported.
    init.create(folder, task=task)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    config = load_config(
        f"configs/init-{task}.yaml", ["compress.formats=[]", "export.formats=[]", "verify.latency_rounds=5"]
    )
    result = local.run(config, runs_dir=Path("runs"), console=Console(file=io.StringIO()))
    assert result.exit_code == 0, result.result_of("evaluate")
    assert (folder / f"serving_models/init-{task}/1/saved_model.pb").is_file()


@pytest.mark.slow
def test_on_a_machine_of_its_own_the_lines_of_ci_run(tmp_path: Path) -> None:
    """From headrace's wheel to a commit whose CI passes: what is run is what the files for GitHub and GitLab say."""
    environment = _new_environment(tmp_path / "venv")
    bash = _Bash(tmp_path, environment)
    wheel = _build_wheel(tmp_path, environment)
    bash.run(f"pip install --no-deps {wheel}")
    bash.run("headrace init demo", expect="headrace came from a disk of this machine (headrace @ file:")
    bash.folder = tmp_path / "demo"
    bash.run("git init --quiet --initial-branch main && git add . && git commit --quiet --message first")
    bash.run("git clone --quiet --bare . ../origin && git remote add origin ../origin")
    for name, old, new in (("configs/demo.yaml", "epochs: 20", "epochs: 21"), ("demo/model.py", '"relu"', '"elu"')):
        file = bash.folder / name
        file.write_text(file.read_text().replace(old, new))

    github = yaml.safe_load((bash.folder / GITHUB).read_text())["jobs"]
    gitlab = yaml.safe_load((bash.folder / GITLAB).read_text())
    output = {line: bash.run(line) for line in _lines(github["check"])}
    assert "4 passed" in output["make test"]
    assert "train.epochs: 20 -> 21" in output["make diff BASE=FETCH_HEAD"]
    assert "\ncode\n" in output["make diff BASE=FETCH_HEAD"]
    for line in gitlab["check"]["script"]:
        if line not in output:
            bash.run(line, CI_DEFAULT_BRANCH="main")

    _put_builder(tmp_path / "bin")
    image = {"IMAGE": "registry.example/demo:1", "HEADRACE_IMAGE": f"registry.example/headrace@sha256:{'b' * 64}"}
    nobody = {"KF_PIPELINES_ENDPOINT": "http://localhost:9", "KF_PIPELINES_TOKEN": "secret"}
    login, build, submit = _lines(github["submit"])
    bash.run(login, **image, REGISTRY_USER="me", REGISTRY_PASSWORD="secret")
    bash.run(build, **image)
    told = bash.run(submit, **image, **nobody, fails=True)
    assert f"--image registry.example/demo@sha256:{'d' * 64} --token-env KF_PIPELINES_TOKEN" in told
    assert "No Kubeflow Pipelines API answers at http://localhost:9" in told
    assert "secret" not in told


def _lines(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def _new_environment(folder: Path) -> dict[str, str]:
    """A virtual environment that sees the packages of this one, so that nothing is downloaded; as variables."""
    venv.create(folder, with_pip=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    seen = sysconfig.get_path("purelib")
    (site_packages / "seen.pth").write_text(f"import site; site.addsitedir({seen!r})\n")
    git = {f"GIT_{who}_{what}": "x@x.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = f"{folder / 'bin'}:{folder.parent / 'bin'}:{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    return inherited | git | offline | {"VIRTUAL_ENV": str(folder), "PATH": path}


def _build_wheel(folder: Path, environment: dict[str, str]) -> Path:
    sources = folder / "sources"
    for name in ("pipelines", "components", "models", "serving"):
        shutil.copytree(PROJECT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, sources)
    command = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = folder.glob("headrace-*.whl")
    return wheel


def _put_builder(folder: Path) -> None:
    """A program that stands in for buildah and docker: it leaves the two digests for which it is asked."""
    folder.mkdir()
    (folder / "buildah").write_text(
        "#!/bin/sh\n"
        "while [ $# -gt 0 ]; do\n"
        f"  case $1 in --iidfile) printf sha256:{'c' * 64} > $2;; --digestfile) printf sha256:{'d' * 64} > $2;; esac\n"
        "  shift\n"
        "done\n"
    )
    (folder / "buildah").chmod(0o755)
    shutil.copy(folder / "buildah", folder / "docker")


class _Bash:
    """Runs lines as the runners of GitHub and GitLab do, each in a shell of its own that stops at the first error."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self._environment = folder, environment

    def run(self, line: str, *, expect: str = "", fails: bool = False, **variables: str) -> str:
        """Run a line and return what it prints."""
        done = subprocess.run(
            ["bash", "-e", "-c", line],
            cwd=self.folder,
            env=self._environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert (done.returncode != 0) == fails, f"{line}: {done.stdout}"
        assert expect in done.stdout, f"{line}: {done.stdout}"
        return done.stdout
