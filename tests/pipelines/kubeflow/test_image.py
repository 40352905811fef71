"""headrace image build: what the builder is told and what becomes of its answers, with a program in its place."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipelines.kubeflow import image

DIGEST = "sha256:" + "1" * 64
OTHER_DIGEST = "sha256:" + "2" * 64
BASE = f"docker.io/library/python@{DIGEST}"
# Notes its arguments, writes the files it is asked for, and ends as $FAIL says.
BUILDER = f"""
import json, os, sys
from pathlib import Path

arguments = sys.argv[1:]
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps([Path(sys.argv[0]).name, *arguments]) + "\\n")
print("said by the builder")
for option, text in (("--iidfile", "{DIGEST}"), ("--digestfile", "{OTHER_DIGEST}\\n")):
    if option in arguments:
        Path(arguments[arguments.index(option) + 1]).write_text(text)
if arguments[0] == "image":
    print(os.environ["REPOSITORIES"])
sys.exit(7 if arguments[0] == os.environ.get("FAIL") else 0)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a Containerfile, and nothing on the PATH."""
    (tmp_path / "Containerfile").write_text("ARG BASE\nFROM ${BASE}\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def install(project: Path, *builders: str) -> None:
    for name in builders:
        script = project / "bin" / name
        script.write_text(f"#!{sys.executable}\n{BUILDER}")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)


def build(arguments: str) -> Result:
    return CliRunner().invoke(image.main, ["build", *shlex.split(arguments)])


def calls(project: Path) -> list[list[str]]:
    return [json.loads(line) for line in (project / "calls.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("builder", image.BUILDERS)
def test_every_builder_is_told_the_same_and_the_id_alone_is_printed(project: Path, builder: str) -> None:
    install(project, builder)
    done = build(
        f"--base {BASE} --tag r.example:5000/m:2 --builder-arg=--network=host --builder-arg=--build-arg=EXTRAS"
    )
    assert (done.exit_code, done.stdout) == (0, f"{DIGEST}\n")
    ((name, *arguments),) = calls(project)
    id_file = arguments.pop(arguments.index("--iidfile") + 1)
    assert not os.path.exists(id_file)
    expected = f"build --file Containerfile --tag r.example:5000/m:2 --build-arg BASE={BASE} --iidfile"
    assert (name, shlex.join(arguments)) == (builder, f"{expected} --network=host --build-arg=EXTRAS .")


def test_the_first_builder_that_is_there_is_taken_unless_one_is_named(project: Path) -> None:
    install(project, "podman", "docker")
    for choice in ("", "--builder docker"):
        assert build(f"--base {DIGEST} --tag m {choice}").exit_code == 0
    assert [call[0] for call in calls(project)] == ["podman", "docker"]


@pytest.mark.parametrize(
    ("builder", "tag", "reference"),
    [
        ("buildah", "r.example:5000/team/m:2", f"r.example:5000/team/m@{OTHER_DIGEST}"),
        ("podman", "r.example:5000/m", f"r.example:5000/m@{OTHER_DIGEST}"),
        ("docker", "r.example/team/m:2", f"r.example/team/m@{OTHER_DIGEST}"),
        ("docker", "docker.io/team/m:2", f"docker.io/team/m@{OTHER_DIGEST}"),
    ],
)
def test_a_pushed_image_is_named_by_the_digest_that_the_registry_gave(
    project: Path, monkeypatch: pytest.MonkeyPatch, builder: str, tag: str, reference: str
) -> None:
    install(project, builder)
    monkeypatch.setenv("REPOSITORIES", f"else.example/m@{DIGEST}\n{reference.removeprefix('docker.io/')}")
    done = build(f"--base {BASE} --tag {tag} --push")
    assert (done.exit_code, done.stdout) == (0, f"{reference}\n")
    assert [call[1] for call in calls(project)][:2] == ["build", "push"]
    assert calls(project)[1][-1] == tag


def test_a_digest_of_another_repository_is_not_taken_for_that_of_the_push(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(project, "docker")
    monkeypatch.setenv("REPOSITORIES", f"else.example/m@{DIGEST}")
    done = build(f"--base {BASE} --tag r.example/m:2 --push")
    assert done.exit_code == 1
    assert "docker knows no digest of it in r.example/m" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ("--base python:3.11-slim", 2, "--base: python:3.11-slim may be another image tomorrow. Add its digest"),
        (f"--base python@{DIGEST[:-1]}", 2, "may be another image tomorrow"),
        (f"--base {BASE} --context bin", 2, "bin has no Containerfile"),
        (f"--base {BASE} --builder docker", 1, "There is no docker on the PATH"),
        ("", 2, "Missing option '--base'"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_runs(
    project: Path, arguments: str, exit_code: int, message: str
) -> None:
    install(project, "podman")
    done = build(f"--tag m {arguments}")
    assert done.exit_code == exit_code
    assert message in done.stderr
    assert not (project / "calls.jsonl").exists()


def test_without_any_builder_the_error_names_them_all(project: Path) -> None:
    done = build(f"--base {BASE} --tag m")
    assert done.exit_code == 1
    assert "There is none of buildah, podman, docker on the PATH to build the image with." in done.stderr


@pytest.mark.parametrize("step", ["build", "push"])
def test_a_builder_that_fails_fails_the_command(project: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    install(project, "buildah")
    monkeypatch.setenv("FAIL", step)
    done = build(f"--base {BASE} --tag m --push")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"`buildah {step}` ended with exit code 7" in done.stderr
