"""Each check of `doctor` fires on an environment that has its fault, and is content with one that has none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines import doctor
from pipelines.doctor import CHECKS, GIB, Environment, Finding


@pytest.fixture
def healthy(tmp_path: Path) -> Environment:
    """An environment with nothing to mend."""
    for package in ("keras", "tensorflow"):
        (tmp_path / package / "__pycache__").mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "__pycache__/__init__.cpython-311.pyc").touch()
    return Environment(
        python=(3, 11),
        versions={"kfp": "2.17.3", "protobuf": "6.33.6", "numpy": "2.4.6", "tf2onnx": "1.17.0", "pytest": "9.0"},
        requires=["kfp==2.17.3", "tf2onnx==1.17.*", "pytest>=8.4; extra == 'test'", "never; python_version < '3'"],
        variables={},
        modules=frozenset({"pip"}),
        tools=frozenset({"make", "podman"}),
        site_packages=tmp_path,
        free_disk_bytes=50 * GIB,
        memory_bytes=16 * GIB,
        shared_memory_bytes=GIB,
        machine="x86_64",
        cpu_flags=frozenset({"avx", "avx2", "avx512_vnni"}),
        editable=True,
    )


def test_a_healthy_environment_has_nothing_to_mend(healthy: Environment) -> None:
    findings = [check(healthy) for check in CHECKS]
    assert {finding.status for finding in findings} == {"ok"}
    assert not any(finding.mend for finding in findings)
    assert len({finding.name for finding in findings}) == len(CHECKS)


FAULTS: list[tuple[Any, dict[str, Any], str, str, str]] = [
    (doctor.check_python, {"python": (3, 9)}, "problem", "3.9", "Python 3.10 to 3.13"),
    (doctor.check_python, {"python": (3, 14)}, "problem", "3.14", "Python 3.10 to 3.13"),
    (doctor.check_install, {"editable": None}, "warning", "from the folder only", "pip install -e ."),
    (doctor.check_install, {"editable": False}, "warning", "a copy", "pip install -e ."),
    (doctor.check_requirements, {"requires": None}, "problem", "headrace is not installed", "pip install -e ."),
    (doctor.check_requirements, {"requires": ["kfp==2.18"]}, "problem", "kfp 2.17.3 is not ==2.18", "pip install"),
    (
        doctor.check_requirements,
        {"requires": ["duckdb>=1.4"]},
        "problem",
        "duckdb is not installed (wanted >=1.4)",
        "pip",
    ),
    (doctor.check_together, {"versions": {"kfp": "2.16.1"}}, "problem", "kfp 2.16.1: its local runner", "kfp==2.17.3"),
    (doctor.check_together, {"versions": {"protobuf": "7.1"}}, "problem", "protobuf 7.1: ", "protobuf<7,>=6.31"),
    (doctor.check_together, {"versions": {"numpy": "1.26.4"}}, "problem", "numpy 1.26.4: ", "numpy<3,>=2"),
    (doctor.check_extras, {"versions": {}}, "warning", "not installed: test", "pip install -e '.[test]'"),
    (doctor.check_pip, {"modules": frozenset()}, "warning", "install_kfp_package=False", "ensurepip"),
    (
        doctor.check_bytecode,
        {"variables": {"PYTHONDONTWRITEBYTECODE": "1"}},
        "warning",
        "every start compiles",
        "unset",
    ),
    (doctor.check_legacy_keras, {"variables": {"TF_USE_LEGACY_KERAS": "1"}}, "problem", "Keras 2", "unset"),
    (doctor.check_backend, {"variables": {"KERAS_BACKEND": "jax"}}, "problem", "jax", "unset KERAS_BACKEND"),
    (doctor.check_tools, {"tools": frozenset()}, "warning", "not found", "apt-get install make"),
    (doctor.check_image_builder, {"tools": frozenset({"make"})}, "warning", "docker, podman, buildah", "apt-get"),
    (doctor.check_disk, {"free_disk_bytes": 5 * GIB}, "warning", "5.0 GiB free", "make room"),
    (doctor.check_disk, {"free_disk_bytes": GIB // 2}, "problem", "0.5 GiB free", "make room"),
    (doctor.check_memory, {"memory_bytes": 3 * GIB}, "warning", "3.0 GiB", "4 GiB or more"),
    (doctor.check_memory, {"memory_bytes": GIB}, "problem", "1.0 GiB", "4 GiB or more"),
    (doctor.check_shared_memory, {"shared_memory_bytes": GIB // 16}, "warning", "0.06 GiB", "--shm-size"),
    (doctor.check_cpu, {"cpu_flags": frozenset({"sse2"})}, "problem", "without AVX", "another machine"),
    (doctor.check_int8, {"cpu_flags": frozenset({"avx", "avx2"})}, "warning", "no VNNI", "the gate of `verify`"),
]


@pytest.mark.parametrize(("check", "fault", "status", "found", "mend"), FAULTS)
def test_each_fault_is_found_with_its_mend(
    healthy: Environment, check: Any, fault: dict[str, Any], status: str, found: str, mend: str
) -> None:
    finding: Finding = check(dataclasses.replace(healthy, **fault))
    assert finding.status == status
    assert found in finding.found
    assert mend in finding.mend


def test_every_check_has_a_fault_that_makes_it_fire() -> None:
    assert {check for check, *_ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(
    "quirk",
    [
        {"machine": "aarch64", "cpu_flags": frozenset()},
        {"cpu_flags": None},
        {"memory_bytes": None},
        {"shared_memory_bytes": None},
        {"variables": {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "0"}},
        {"python": (3, 13)},
    ],
)
def test_what_is_merely_different_is_fine(healthy: Environment, quirk: dict[str, Any]) -> None:
    assert {check(dataclasses.replace(healthy, **quirk)).status for check in CHECKS} == {"ok"}


def test_packages_without_bytecode_are_found(healthy: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in healthy.site_packages.rglob("*.pyc"):
        file.unlink()
    finding = doctor.check_bytecode(healthy)
    assert finding.status == "warning"
    assert finding.mend == f"python -m compileall -q {healthy.site_packages}"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    finding = doctor.check_bytecode(healthy)
    assert "is not writable" in finding.found
    assert finding.mend.startswith("as its owner")


def test_this_environment_can_be_looked_at() -> None:
    environment = Environment.of_this_process()
    assert environment.versions["tensorflow"].startswith("2.")
    assert environment.free_disk_bytes > 0
    assert doctor.check_python(environment).status == "ok"
    assert doctor.check_together(environment).status == "ok"


def test_command_prints_every_check_and_ends_with_1_on_a_problem(
    healthy: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "of_this_process", classmethod(lambda cls: healthy))
    outcome = CliRunner().invoke(doctor.main, [])
    assert outcome.exit_code == 0, outcome.output
    assert len(re.findall(r"^ok ", outcome.output, re.MULTILINE)) == len(CHECKS)

    broken = dataclasses.replace(healthy, python=(3, 9), tools=frozenset(), requires=["x[y]==1"])
    monkeypatch.setattr(Environment, "of_this_process", classmethod(lambda cls: broken))
    outcome = CliRunner().invoke(doctor.main, [])
    assert outcome.exit_code == 1
    assert "mend: make the virtual environment with Python 3.10 to 3.13" in outcome.output
    assert re.search(r"^warning  make", outcome.output, re.MULTILINE)
