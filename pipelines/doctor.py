"""What in this environment would bite, and how to mend it: `python -m pipelines.doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import click
from packaging.requirements import Requirement
from packaging.version import Version

from pipelines.exits import reported

PROJECT = "headrace"
SUPPORTED_PYTHON = ((3, 10), (3, 13))
GIB = 1 << 30
_MIN_DISK, _MIN_MEMORY, _MIN_SHARED_MEMORY = 10 * GIB, 4 * GIB, GIB // 4
_IMAGE_BUILDERS = ("docker", "podman", "buildah")
_INSTALL = "pip install -e ."

Status = Literal["ok", "warning", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was looked at.
        status: ok; warning: something will be slower or missing; problem: something will fail.
        found: What is there.
        mend: How to mend it; empty if nothing is to mend.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What the checks look at, so that a test can make up its own.

    Attributes:
        python: Version of the interpreter.
        versions: Installed distribution, in lower case -> version.
        requires: Requirements of this project, as its metadata has them; `None`: it is not installed.
        variables: Environment variables.
        modules: Names of the modules asked for that can be imported.
        tools: Names of the programs asked for that are on the path.
        site_packages: Where packages are installed.
        free_disk_bytes: Free in the working directory.
        memory_bytes: Memory that this process may use, `None` if unknown.
        shared_memory_bytes: Size of /dev/shm, `None` if there is none.
        machine: As `platform.machine()`.
        cpu_flags: Features of the CPU, `None` if unknown.
        editable: Whether the project is installed in editable mode, `None` if it is not installed.
    """

    python: tuple[int, int]
    versions: Mapping[str, str]
    requires: list[str] | None
    variables: Mapping[str, str]
    modules: frozenset[str]
    tools: frozenset[str]
    site_packages: Path
    free_disk_bytes: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    machine: str
    cpu_flags: frozenset[str] | None
    editable: bool | None

    @classmethod
    def of_this_process(cls) -> Environment:
        """The real one."""
        installed = importlib.metadata.distributions()
        return cls(
            python=sys.version_info[:2],
            versions={each.metadata["Name"].lower().replace("_", "-"): each.version for each in installed},
            requires=_own_requirements(),
            variables=os.environ,
            modules=frozenset(name for name in ("pip",) if importlib.util.find_spec(name)),
            tools=frozenset(name for name in ("make", *_IMAGE_BUILDERS) if shutil.which(name)),
            site_packages=Path(sysconfig.get_path("purelib")),
            free_disk_bytes=shutil.disk_usage(".").free,
            memory_bytes=_memory(),
            shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
            machine=platform.machine(),
            cpu_flags=_cpu_flags(),
            editable=_is_editable(),
        )


def check_python(env: Environment) -> Finding:
    """The interpreter is one that TensorFlow and kfp have wheels for."""
    low, high = ("{}.{}".format(*bound) for bound in SUPPORTED_PYTHON)
    found = "{}.{}".format(*env.python)
    if SUPPORTED_PYTHON[0] <= env.python <= SUPPORTED_PYTHON[1]:
        return Finding("Python", "ok", found)
    return Finding("Python", "problem", found, f"make the virtual environment with Python {low} to {high}")


def check_requirements(env: Environment) -> Finding:
    """Every requirement of the project is installed in a version that fits."""
    name = "required packages"
    if env.requires is None:
        return Finding(name, "problem", f"{PROJECT} is not installed", _INSTALL)
    wanted = [Requirement(text) for text in env.requires]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    misfits = [misfit for each in wanted if (misfit := _misfit(each, env))]
    if not misfits:
        return Finding(name, "ok", f"{len(wanted)} fit")
    return Finding(name, "problem", "; ".join(misfits), _INSTALL)


def check_together(env: Environment) -> Finding:
    """Versions that a resolver accepts and that do not work together."""
    name = "versions together"
    if "kfp" in env.versions and Version(env.versions["kfp"]) < Version("2.17"):
        found = f"kfp {env.versions['kfp']}: its local runner runs every branch of an If and reports success"
        return Finding(name, "problem", found, "pip install 'kfp==2.17.3'")
    for package, bounds, why in (
        ("protobuf", ">=6.31,<7", "TensorFlow 2.21 and tensorflow-serving-api are generated for protobuf 6"),
        ("numpy", ">=2,<3", "TensorFlow 2.21 is built against numpy 2"),
    ):
        wanted = Requirement(f"{package}{bounds}")
        if package in env.versions and _misfit(wanted, env):
            return Finding(name, "problem", f"{package} {env.versions[package]}: {why}", f"pip install '{wanted}'")
    return Finding(name, "ok", "kfp, protobuf and numpy fit TensorFlow")


def check_extras(env: Environment) -> Finding:
    """The optional parts of the project that are not installed."""
    missing = _missing_extras(env)
    if not missing:
        return Finding("extras", "ok", "all installed")
    return Finding(
        "extras", "warning", f"not installed: {', '.join(missing)}", f"pip install -e '.[{','.join(missing)}]'"
    )


def check_pip(env: Environment) -> Finding:
    """kfp's default components call pip; ours do not."""
    if "pip" in env.modules:
        return Finding("pip", "ok", "installed")
    found = "no pip in this environment: kfp components that do not set install_kfp_package=False fail here"
    return Finding("pip", "warning", found, "python -m ensurepip, or uv venv --seed")


def check_bytecode(env: Environment) -> Finding:
    """Bytecode of the packages is kept; without it each start compiles them (kfp: 4.5 s in place of 1.2)."""
    name = "bytecode"
    if env.variables.get("PYTHONDONTWRITEBYTECODE"):
        found = "PYTHONDONTWRITEBYTECODE is set: every start compiles what it imports"
        return Finding(name, "warning", found, "unset PYTHONDONTWRITEBYTECODE")
    if _is_compiled(env.site_packages):
        return Finding(name, "ok", "compiled")
    compile_all = f"python -m compileall -q {env.site_packages}"
    if os.access(env.site_packages, os.W_OK):
        return Finding(name, "warning", "packages are not compiled yet: the first start is slow", compile_all)
    found = f"packages are not compiled and {env.site_packages} is not writable: every start compiles them"
    return Finding(name, "warning", found, f"as its owner: {compile_all}")


def check_legacy_keras(env: Environment) -> Finding:
    """tf.keras stands for Keras 3."""
    value = env.variables.get("TF_USE_LEGACY_KERAS", "")
    if value.lower() not in ("1", "true"):
        return Finding("TF_USE_LEGACY_KERAS", "ok", "not set")
    found = f"{value}: tf.keras stands for Keras 2, whose models do not fit"
    return Finding("TF_USE_LEGACY_KERAS", "problem", found, "unset TF_USE_LEGACY_KERAS")


def check_backend(env: Environment) -> Finding:
    """Keras runs on TensorFlow."""
    value = env.variables.get("KERAS_BACKEND", "tensorflow")
    if value == "tensorflow":
        return Finding("KERAS_BACKEND", "ok", "tensorflow")
    return Finding("KERAS_BACKEND", "problem", f"{value}: training and export need tensorflow", "unset KERAS_BACKEND")


def check_tools(env: Environment) -> Finding:
    """`make` for `make run` and `make test`."""
    if "make" in env.tools:
        return Finding("make", "ok", "found")
    return Finding("make", "warning", "not found", "apt-get install make, or use the plain commands in README.md")


def check_image_builder(env: Environment) -> Finding:
    """Something that builds the image for Kubeflow."""
    found = [name for name in _IMAGE_BUILDERS if name in env.tools]
    if found:
        return Finding("image builder", "ok", found[0])
    mend = "apt-get install podman; only the image for Kubeflow needs it"
    return Finding("image builder", "warning", f"none of {', '.join(_IMAGE_BUILDERS)}", mend)


def check_disk(env: Environment) -> Finding:
    """Room for artifacts in the working directory."""
    found = f"{env.free_disk_bytes / GIB:.1f} GiB free here"
    if env.free_disk_bytes >= _MIN_DISK:
        return Finding("disk", "ok", found)
    status: Status = "warning" if env.free_disk_bytes >= _MIN_DISK // 10 else "problem"
    return Finding("disk", status, found, "make room, or give a --runs-dir on a larger disk")


def check_memory(env: Environment) -> Finding:
    """Memory for TensorFlow and a batch of data."""
    if env.memory_bytes is None:
        return Finding("memory", "ok", "unknown")
    found = f"{env.memory_bytes / GIB:.1f} GiB"
    if env.memory_bytes >= _MIN_MEMORY:
        return Finding("memory", "ok", found)
    status: Status = "warning" if env.memory_bytes >= _MIN_MEMORY // 2 else "problem"
    return Finding("memory", status, found, f"give this machine or container {_MIN_MEMORY // GIB} GiB or more")


def check_shared_memory(env: Environment) -> Finding:
    """Containers get 64 MB of /dev/shm, too little for worker processes that pass batches through it."""
    if env.shared_memory_bytes is None:
        return Finding("/dev/shm", "ok", "none on this system")
    found = f"{env.shared_memory_bytes / GIB:.2f} GiB"
    if env.shared_memory_bytes >= _MIN_SHARED_MEMORY:
        return Finding("/dev/shm", "ok", found)
    return Finding("/dev/shm", "warning", found, "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory")


def check_cpu(env: Environment) -> Finding:
    """TensorFlow's x86-64 wheels use AVX."""
    if env.cpu_flags is None or env.machine not in ("x86_64", "AMD64"):
        return Finding("CPU", "ok", env.machine)
    if "avx" in env.cpu_flags:
        return Finding("CPU", "ok", f"{env.machine} with {'AVX2' if 'avx2' in env.cpu_flags else 'AVX'}")
    found = f"{env.machine} without AVX: importing TensorFlow ends in 'Illegal instruction'"
    return Finding("CPU", "problem", found, "use another machine, or the CPU type 'host' in your virtual machine")


def check_int8(env: Environment) -> Finding:
    """Sums of int8 products fit 16 bits. Source: ONNX Runtime, "Quantize ONNX models"."""
    if env.cpu_flags is None or env.machine not in ("x86_64", "AMD64"):
        return Finding("int8", "ok", env.machine)
    found = sorted(flag for flag in env.cpu_flags if "vnni" in flag)
    if found:
        return Finding("int8", "ok", ", ".join(found))
    mend = "the gate of `verify` says what it costs; TFLite's int8 is exact here, and so is a CPU with VNNI"
    return Finding("int8", "warning", "no VNNI: int8 ONNX and OpenVINO models lose accuracy here", mend)


def check_install(env: Environment) -> Finding:
    """An editable install runs the sources that one edits."""
    if env.editable is None:
        return Finding("installation", "warning", f"{PROJECT} runs from the folder only", _INSTALL)
    if env.editable:
        return Finding("installation", "ok", "editable")
    found = "a copy: edits of the sources do not count unless you start in their folder; configs/ is not in it"
    return Finding("installation", "warning", found, _INSTALL)


CHECKS: tuple[Callable[[Environment], Finding], ...] = (
    check_python,
    check_install,
    check_requirements,
    check_together,
    check_extras,
    check_pip,
    check_bytecode,
    check_legacy_keras,
    check_backend,
    check_tools,
    check_image_builder,
    check_disk,
    check_memory,
    check_shared_memory,
    check_cpu,
    check_int8,
)


def _own_requirements() -> list[str] | None:
    try:
        return importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def _misfit(wanted: Requirement, env: Environment) -> str | None:
    version = env.versions.get(wanted.name.lower().replace("_", "-"))
    if version is None:
        return f"{wanted.name} is not installed (wanted {wanted.specifier or 'any'})"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{wanted.name} {version} is not {wanted.specifier}"
    return None


def _missing_extras(env: Environment) -> list[str]:
    wanted = [Requirement(text) for text in env.requires or ()]
    conditional = [each for each in wanted if each.marker is not None and "extra" in str(each.marker)]
    names = {part for each in conditional for part in str(each.marker).replace('"', "'").split("'")[1::2]}
    needed = {
        name: [each for each in conditional if each.marker and each.marker.evaluate({"extra": name})] for name in names
    }
    return sorted(name for name, those in needed.items() if any(_misfit(each, env) for each in those))


def _is_compiled(site_packages: Path) -> bool:
    packages = ("keras", "kfp", "tensorflow", "pydantic")
    folders = [site_packages / name for name in packages if (site_packages / name / "__init__.py").is_file()]
    return all(any((folder / "__pycache__").glob("__init__.*.pyc")) for folder in folders)


def _memory() -> int | None:
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = Path("/sys/fs/cgroup", name)
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            sizes.append(int(text))
    return min(sizes, default=None)


def _cpu_flags() -> frozenset[str] | None:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return None
    lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
    return frozenset(lines[0].partition(":")[2].split()) if lines else None


def _is_editable() -> bool | None:
    """Of the installed project; the metadata that a build leaves in the sources' folder is no installation."""
    here = Path(__file__).resolve().parent.parent
    for installed in importlib.metadata.distributions(name=PROJECT):
        record = installed.read_text("direct_url.json")
        if record and json.loads(record).get("dir_info", {}).get("editable"):
            return True
        if Path(str(installed.locate_file(""))).resolve() != here:
            return False
    return None


def print_findings(findings: list[Finding]) -> None:
    """Print a table of what the checks found, with a line below it for each thing to mend."""
    from rich.console import Console
    from rich.table import Table

    colors = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for each in findings:
        mend = f"\n[dim]mend:[/dim] {_escape(each.mend)}" if each.mend else ""
        table.add_row(f"[{colors[each.status]}]{each.status}[/]", _escape(each.name), _escape(each.found) + mend)
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Say what in this environment would bite, each with its mend. Exit code 1 if something will fail."""
    with reported(debug=debug):
        environment = Environment.of_this_process()
        findings = [check(environment) for check in CHECKS]
        print_findings(findings)
    raise SystemExit(1 if any(each.status == "problem" for each in findings) else 0)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.doctor")
