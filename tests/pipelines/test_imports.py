"""Who may import whom, as DESIGN.md's table has it: in the running process, and in the sources."""

from __future__ import annotations

import ast
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipelines.steps import STEPS
from tests.pipelines import fakes

PROJECT = Path(__file__).resolve().parents[2]
HEAVY = {"tensorflow", "keras", "numpy"}
MOST_CPU_SECONDS = 1.5  # Measured 0.1 to 0.4; generous, for machines are shared.

LIGHT_MODULES = [
    "pipelines.config",
    "pipelines.steps",
    "pipelines.local",
    "pipelines.cli",
    "pipelines.doctor",
    "pipelines.tracking",
    "components.config",
    "components.artifacts",
    "components.plugins",
    "components.errors",
    "components.external",
    "components.progress",
    "components.search_space",
    "pipelines.tuned",
    "pipelines.kubeflow.katib",
]
COMMANDS = [
    (["pipelines.local", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.cli", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.local", "wrong.yaml"], 2, {*HEAVY, "kfp", "rich"}),
    (["pipelines.local", "right.yaml", "train.epocs=3"], 2, {*HEAVY, "kfp", "rich"}),
    (["pipelines.compile", "--help"], 0, HEAVY),
    (["pipelines.submit", "--help"], 0, {*HEAVY, "kfp", "rich"}),
    (["pipelines.diff", "--help"], 0, {*HEAVY, "kfp", "rich"}),
    (["pipelines.replay", "--help"], 0, {*HEAVY, "kfp", "rich"}),
    (["pipelines.init", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.init", "demo"], 0, {*HEAVY, "kfp"}),
    (["pipelines.doctor", "--help"], 0, {*HEAVY, "kfp"}),
    (["pipelines.kubeflow.katib", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.monitor", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.lineage", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.statistics", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.folds", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.manifests", "--help"], 0, {*HEAVY, "kfp", "pydantic"}),
    (["pipelines.manifests", "model_name=m", "model_uri=pvc://claim/m"], 0, {*HEAVY, "kfp"}),
    (["serving", "--help"], 0, HEAVY),
]


def run_python(code: str, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run Python code and return with it the CPU seconds that it took."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", code, *arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_pulls_in_nothing_heavy(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done, _ = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & {*HEAVY, "kfp"} == set()


def _id_of(value: object) -> str:
    # The same in every process, which the order of a set is not.
    return str(sorted(value) if isinstance(value, set) else value)[:50]


@pytest.mark.parametrize(("arguments", "exit_code", "forbidden"), COMMANDS, ids=_id_of)
def test_running_pulls_in_nothing_heavy(
    arguments: list[str], exit_code: int, forbidden: set[str], tmp_path: Path
) -> None:
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(fakes.settings()))
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(fakes.settings(trian={})))
    code = (
        "import runpy, sys\n"
        "module, sys.argv = sys.argv[1], sys.argv[1:]\n"
        "try: runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        "finally: print('\\nMODULES', *sorted(sys.modules))\n"
    )
    done, seconds = run_python(code, tmp_path, *arguments)
    assert done.returncode == exit_code, done.stderr
    loaded = set(done.stdout.rpartition("MODULES")[2].split())
    assert "click" in loaded
    assert loaded & forbidden == set()
    assert "Traceback" not in done.stderr
    if exit_code == 2:
        assert "Did you mean" in done.stderr
    if "kfp" in forbidden:
        assert seconds < MOST_CPU_SECONDS


STEP_MODULES = {f"components.{step.name}" for step in STEPS}
LIGHT_FILES = (
    "pipelines/config*.py",
    "pipelines/kubeflow/config.py",
    "pipelines/steps.py",
    "pipelines/local.py",
    "pipelines/exits.py",
    "pipelines/reuse.py",
    "pipelines/yaml_text.py",
    "pipelines/cli.py",
    "components/config.py",
    "components/plugins.py",
    "components/artifacts.py",
    "components/errors.py",
    "components/external.py",
    "components/progress.py",
    "components/search_space.py",
    "pipelines/tuned.py",
    "pipelines/kubeflow/katib.py",
)
TERMINAL_FILES = ("pipelines/view.py", "pipelines/summary.py")
KUBEFLOW_FILES = (
    "components/kfp_components.py",
    "pipelines/training.py",
    "pipelines/compile.py",
    "pipelines/kubeflow/pods.py",
    "pipelines/submit.py",
    "pipelines/kubeflow/kfp_api.py",
    "pipelines/kubeflow/follow.py",
    "pipelines/kubeflow/fetch.py",
    "pipelines/diff.py",
    "pipelines/replay.py",
    "pipelines/kubeflow/containers.py",
)
_USERS_OF_SERVING = {f"components.{name}" for name in ("verify", "deploy", "monitor", "object_store", "artifact_store")}
LIGHT_PACKAGES = {"pydantic", "pydantic_core", "yaml", "click"}
OURS = {"pipelines", "components", "models", "serving"}


@dataclass(frozen=True)
class Import:
    """One imported module, and whether the import runs when the file is imported."""

    module: str
    at_module_level: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def is_of(self, modules: set[str]) -> bool:
        return any(f"{self.module}.".startswith(f"{module}.") for module in modules)


def imports_of(source: str) -> Iterator[Import]:
    """Every import of a source; `from a import b` counts as `a` and `a.b`."""

    def visit(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, at_module_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield Import(node.module or "", at_module_level)
            yield from (Import(f"{node.module}.{alias.name}", at_module_level) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            at_module_level = False
        inside = at_module_level and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), True)


# Their training is that of the step `train`, a trial is one of `tune`, and a share is one of `ingest`.
_OTHERS = {f"components.{name}": {"components.train"} for name in ("optimize", "ptq", "launch", "tune")}
_OTHERS["components.trial"] = {"components.tune"}
_OTHERS["components.encode"] = {"components.ingest"}


def breaches(place: str, source: str) -> list[str]:
    """What a file imports and may not.

    Args:
        place: Its path in the project.
        source: Its text.
    """
    imports = list(imports_of(source))
    top, _, rest = place.partition("/")
    if Path(place).match("models/*.py") or top == "models":
        found = _within(imports, never={"components", "pipelines", "serving", "kfp", "yaml"})
        found += ["os.environ"] if "environ" in source or "getenv" in source else []
        found += _level(imports, {"keras", "numpy", "tensorflow", "models"})
    elif top == "serving":
        tensorflow = set() if place == "serving/backends/saved_model.py" else {"tensorflow", "tensorflow_serving"}
        found = _within(imports, never={"models", "components", "pipelines", "kfp", "keras", *tensorflow})
    elif any(Path(place).match(pattern) for pattern in (*LIGHT_FILES, *TERMINAL_FILES)):
        allowed = LIGHT_PACKAGES | {"components", "pipelines"} | ({"rich"} if place in TERMINAL_FILES else set())
        found = _within(imports, never={"kfp", *HEAVY}) + _level(imports, allowed)
        found += [each.module for each in imports if each.is_of(STEP_MODULES) and each.at_module_level]
    elif place in KUBEFLOW_FILES:
        found = _within(imports, never=HEAVY)
        found += [each.module for each in imports if each.is_of(STEP_MODULES) and each.at_module_level]
    elif top == "components":
        own = f"components.{rest.partition('/')[0].removesuffix('.py')}"
        serving = set() if own in _USERS_OF_SERVING else {"serving"}
        others = _OTHERS.get(own, set())
        found = _within(imports, never={"kfp", "pipelines", *serving, *(STEP_MODULES - {own} - others)})
    else:
        found = _within(imports, never={"kfp", *HEAVY})
    return list(dict.fromkeys(found))


def _within(imports: list[Import], *, never: set[str]) -> list[str]:
    return [each.module for each in imports if each.is_of(never)]


def _level(imports: list[Import], allowed: set[str]) -> list[str]:
    fine = sys.stdlib_module_names | allowed
    return [each.module for each in imports if each.at_module_level and each.package not in fine]


TEMPLATE = PROJECT / "pipelines/template"
SOURCES = sorted(
    str(path.relative_to(PROJECT))
    for folder in OURS
    for path in (PROJECT / folder).rglob("*.py")
    if not path.is_relative_to(TEMPLATE)
)


@pytest.mark.parametrize("place", SOURCES)
def test_sources_import_only_what_their_place_may(place: str) -> None:
    assert breaches(place, (PROJECT / place).read_text()) == []


@pytest.mark.parametrize(
    ("place", "source", "expected"),
    [
        ("pipelines/config.py", "def f():\n    import numpy.linalg", ["numpy.linalg"]),
        ("pipelines/local.py", "import rich", ["rich"]),
        ("pipelines/local.py", "def f():\n    import rich", []),
        ("pipelines/local.py", "if TYPE_CHECKING:\n    import rich", []),
        ("pipelines/local.py", "from components import train", ["components.train"]),
        ("pipelines/local.py", "try:\n    import kfp\nexcept ImportError:\n    pass", ["kfp"]),
        ("pipelines/config_sources.py", "import keras", ["keras"]),
        ("pipelines/view.py", "import rich.text, json", []),
        ("pipelines/summary.py", "import rich, requests", ["requests"]),
        ("pipelines/doctor.py", "import packaging", []),
        ("pipelines/doctor.py", "import tensorflow", ["tensorflow"]),
        ("pipelines/training.py", "import kfp\ndef f():\n    from components.train import train", []),
        ("pipelines/training.py", "import keras\nfrom components.train import train", ["keras", "components.train"]),
        ("components/artifacts.py", "import pyarrow", ["pyarrow"]),
        ("components/train/engine.py", "import tensorflow, keras, models\nfrom components.train import batches", []),
        ("components/train/engine.py", "from components.evaluate import evaluate", ["components.evaluate"]),
        ("components/train/engine.py", "def f():\n    import pipelines.config", ["pipelines.config"]),
        ("components/optimize.py", "from components.train import fit", []),
        ("components/optimize.py", "from components.compress import compress", ["components.compress"]),
        ("components/metrics.py", "import serving.tensors", ["serving.tensors"]),
        ("components/verify/step.py", "import serving.client, kfp", ["kfp"]),
        ("models/resnet.py", "import keras\nimport tensorflow as tf\nfrom models import layers", []),
        ("models/resnet.py", "import os\nos.environ['X']", ["os.environ"]),
        (
            "models/resnet.py",
            "import pyarrow\nfrom components import config",
            ["components", "components.config", "pyarrow"],
        ),
        ("serving/server.py", "import grpc, numpy", []),
        ("serving/backends/saved_model.py", "import tensorflow", []),
        ("serving/backends/memory.py", "def f():\n    import tensorflow", ["tensorflow"]),
        ("serving/protos.py", "from tensorflow_serving import apis", ["tensorflow_serving"]),
        ("serving/server.py", "from components.errors import DataError", ["components.errors"]),
        ("serving/server.py", "def f():\n    import keras", ["keras"]),
    ],
)
def test_the_rules_themselves(place: str, source: str, expected: list[str]) -> None:
    found = breaches(place, source)
    assert set(expected) <= set(found)
    assert bool(found) == bool(expected)
