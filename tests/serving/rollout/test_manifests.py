"""A rollout in a folder of manifests: the files, the command, and a kubectl that notes what it is told."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from serving.errors import ServingError
from serving.manifests import folder as manifest_folder
from serving.manifests.render import render
from serving.model_config import read_config
from serving.rollout import commands
from serving.rollout.places import ManifestFolder
from serving.rollout.rollout import Rollout
from serving.traffic import ROLLOUT_FILE, Traffic
from tests.serving.manifests import checks
from tests.serving.manifests.configs import make_config

GATEWAY = {"canary": {"method": "gateway"}, "stable_version": 3}
REPLICAS = {"canary": {"method": "replicas"}, "stable_version": 3, "replicas": {"min": 9, "max": 9}}


def write(folder: Path, target: str = "kubernetes", name: str = "pinned", **changes: Any) -> Rollout:
    manifest_folder.write(render(make_config(name, **changes), target), folder)
    return Rollout(ManifestFolder(folder))


def objects_in(folder: Path) -> list[dict[str, Any]]:
    """The Kubernetes objects in the base."""
    files = sorted((folder / "base").glob("*.yaml"))
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return [each for each in found if each["kind"] != "Kustomization"]


def manifests_in(folder: Path) -> dict[str, str]:
    """Path -> text of all files but the history."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ROLLOUT_FILE]
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


@pytest.mark.parametrize(
    ("target", "name", "changes"),
    [
        ("kubernetes", "pinned", {}),
        ("kubernetes", "gateway", GATEWAY),
        ("kubernetes", "pinned", REPLICAS),
        ("kserve", "pinned", {}),
        ("kserve", "pinned", {"kserve_mode": "knative"}),
        ("compose", "kind", {"stable_version": 3}),
    ],
    ids=["labels", "gateway", "replicas", "kserve", "knative", "compose"],
)
def test_there_and_back(target: str, name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Each step gives the files that `headrace manifests` gives for its versions, and the method of the canary stays."""
    rollout = write(tmp_path, target, name, **changes)
    canary = changes.get("canary", {})

    def is_as_for(**versions: Any) -> bool:
        return manifests_in(tmp_path) == render(make_config(name, **{**changes, **versions}), target)

    before = manifests_in(tmp_path)
    assert rollout.place.traffic() == Traffic(3)
    assert rollout.deploy(4, 0.1) == rollout.place.traffic() == Traffic(3, 4, 0.1)
    assert is_as_for(canary={"version": 4, "percent": 10, **canary})
    assert rollout.rollback() == rollout.place.traffic() == Traffic(3)
    assert manifests_in(tmp_path) == before
    rollout.deploy(5, 0.11)
    rollout.deploy(5, 0.07)  # 100 times which is 7.000000000000001
    assert rollout.promote() == rollout.place.traffic() == Traffic(5)
    assert is_as_for(stable_version=5, canary=canary or None)
    assert rollout.rollback() == Traffic(3)
    assert [event["action"] for event in rollout.history()] == [
        *["found", "deploy", "rollback", "deploy", "deploy", "promote", "rollback"]
    ]


@pytest.mark.parametrize(("name", "changes"), [("pinned", {}), ("gateway", GATEWAY), ("pinned", REPLICAS)])
def test_what_is_on_trial_is_valid(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "kubernetes", name, **changes).deploy(4, 0.1)
    assert checks.problems(objects_in(tmp_path)) == []


def test_labels_are_in_the_model_config(tmp_path: Path) -> None:
    write(tmp_path, "compose", "kind", stable_version=3).deploy(4)
    (model,) = read_config(tmp_path / "models" / "models.config")
    assert model.labels == {"stable": 3, "canary": 4}


def test_the_gateway_weighs(tmp_path: Path) -> None:
    rollout = write(tmp_path, "kubernetes", "gateway", **GATEWAY)
    rollout.deploy(4, 0.25)
    rollout.deploy(4, 0.5)
    (route,) = [each for each in objects_in(tmp_path) if each["kind"] == "HTTPRoute"]
    weights = {each["name"]: each["weight"] for each in route["spec"]["rules"][0]["backendRefs"]}
    assert weights == {"chicago-taxi-stable": 50, "chicago-taxi-canary": 50}


def test_names_on_the_servers(tmp_path: Path) -> None:
    assert write(tmp_path / "a", "kubernetes").place.model == "chicago_taxi"
    assert write(tmp_path / "b", "kserve").place.model == "chicago-taxi"


def test_versions_come_from_a_folder_that_is_here(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for number in (1, 2):
        (models / str(number)).mkdir(parents=True)
        (models / str(number) / "saved_model.pb").touch()
    rollout = write(tmp_path / "deploy", "compose", "kind", model_uri=f"file://{models}")
    with pytest.raises(ServingError, match=r"has no version 3, only \[1, 2\]"):
        rollout.deploy(3)
    assert rollout.deploy() == Traffic(1, 2, 0.1)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"stable_version": None}, (4,), "follows the newest version, so nothing says beside which one 4 is on trial"),
        ({}, (), "does not say which versions there are: give --version"),
        ({}, (3,), "version 3 is the stable one already"),
        ({}, (4, 0.125), "divide requests in whole percents, 1 to 99, but got 12.5"),
        ({}, (4, 0.0), "divide requests in whole percents, 1 to 99, but got 0"),
        ({"canary": {"method": "replicas"}}, (4, 0.3), "canary.percent 30 cannot be had by replicas: 1 beside 1"),
    ],
)
def test_what_is_refused_changes_nothing(
    changes: dict[str, Any], arguments: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    rollout = write(tmp_path, **changes)
    before = manifests_in(tmp_path)
    with pytest.raises(ServingError, match=message):
        rollout.deploy(*arguments)
    assert manifests_in(tmp_path) == before


def test_all_at_once_pins_the_version(tmp_path: Path) -> None:
    rollout = write(tmp_path, stable_version=None)
    with pytest.raises(ServingError, match="follows the newest version, whichever that is"):
        rollout.rollback()
    assert rollout.deploy(4, 1) == rollout.place.traffic() == Traffic(4)
    with pytest.raises(ServingError, match="there is no version before 4"):
        rollout.rollback()


KUBECTL = f"""#!{sys.executable}
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
with (folder / "told").open("a") as told:
    told.write(json.dumps(sys.argv[1:]) + "\\n")
if (folder / "fails").exists():
    sys.exit("error: You must be logged in to the server (Unauthorized)")
print("deployment.apps/chicago-taxi configured")
"""


class Kubectl:
    """A program of that name, first on the PATH.

    Attributes:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("kubectl", "docker"):
            (folder / name).write_text(KUBECTL)
            (folder / name).chmod(0o755)

    def told(self) -> list[str]:
        """The arguments of each call since the last look."""
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [" ".join(json.loads(line)) for line in lines]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Kubectl(tmp_path / "bin")


def invoke(command: Any, *arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_commands_with_a_gateway(tmp_path: Path, kubectl: Kubectl) -> None:
    folder = tmp_path / "it's deployed"
    write(folder, "kubernetes", "gateway", **GATEWAY)
    code, output = invoke(commands.deploy, folder, "--version=4", "--canary_share=0.2")
    assert (code, kubectl.told()) == (0, [])
    assert output == (
        "version 4 gets 20% of the requests, 3 the rest\n"
        f"to bring it there: kubectl apply -k {shlex.quote(f'{folder}/overlays/production')}\n"
    )
    code, output = invoke(commands.deploy, folder, "--version=4", "--canary_share=0.4", "--apply")
    assert (code, output) == (0, "version 4 gets 40% of the requests, 3 the rest\n")
    assert kubectl.told() == [f"apply -k {folder}/overlays/production"]
    assert invoke(commands.promote, folder, "--apply", "--overlay=dev") == (0, "version 4 gets all requests\n")
    gone = "deployment/chicago-taxi-canary horizontalpodautoscaler/chicago-taxi-canary service/chicago-taxi-canary"
    assert kubectl.told() == [
        f"apply -k {folder}/overlays/dev",
        f"delete {gone} --ignore-not-found --namespace serving-dev",
    ]
    assert invoke(commands.rollback, folder, "--apply") == (0, "version 3 gets all requests\n")
    assert len(kubectl.told()) == 2


def test_clients_choose_by_label(tmp_path: Path, kubectl: Kubectl) -> None:
    folder = tmp_path / "deploy"
    write(folder)
    code, output = invoke(commands.deploy, folder, "--version=4", "--apply")
    assert code == 0 and output.startswith(
        "version 4 is served beside 3, as /labels/canary and /labels/stable: clients"
    )
    assert "those that name neither get the higher one, 4\n" in output
    assert invoke(commands.rollback, folder, "--apply") == (0, "version 3 gets all requests\n")
    assert kubectl.told() == [f"apply -k {folder}/overlays/production"] * 2


@pytest.mark.parametrize(
    ("target", "name", "told"),
    [
        ("kserve", "pinned", "apply -f {}/inferenceservice.yaml"),
        ("compose", "kind", "compose -f {}/compose.yaml up --detach"),
    ],
)
def test_commands_elsewhere(target: str, name: str, told: str, tmp_path: Path, kubectl: Kubectl) -> None:
    folder = tmp_path / "deploy"
    write(folder, target, name, stable_version=3)
    assert invoke(commands.deploy, folder, "--version=4", "--apply")[0] == 0
    assert kubectl.told() == [told.format(folder)]


def test_kubectl_that_fails_is_an_error(tmp_path: Path, kubectl: Kubectl) -> None:
    folder = tmp_path / "deploy"
    rollout = write(folder, "kubernetes", "gateway", **GATEWAY)
    rollout.deploy(4)
    (kubectl.folder / "fails").touch()
    code, output = invoke(commands.promote, folder, "--apply")
    assert code == 1
    command = f"kubectl apply -k {folder}/overlays/production"
    assert f"Error: {command} ended with exit code 1: error: You must be logged in to the server" in output
    assert (
        f"{folder} says already what is to serve; mend that, then run {command} && kubectl delete deployment/" in output
    )
    assert rollout.place.traffic() == Traffic(4) and rollout.history()[-1]["action"] == "promote"


def test_without_kubectl_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deploy"
    rollout = write(folder)
    before = manifests_in(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = invoke(commands.deploy, folder, "--version=4", "--apply")
    assert (code, "Error: kubectl is not on the PATH: install it, or change the files alone" in output) == (1, True)
    assert rollout.place.traffic() == Traffic(3)
    assert manifests_in(folder) == before


def test_a_model_name_is_not_taken_beside_that_of_the_manifests(tmp_path: Path) -> None:
    write(tmp_path)
    code, output = invoke(commands.deploy, tmp_path, "--version=4", "--model=taxi")
    assert code == 1 and "say what the model is called: leave --model out" in output
