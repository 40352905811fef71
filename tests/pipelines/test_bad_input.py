"""What goes wrong for a user of `python -m pipelines.local`, with the real steps on real trips: exit code and message.

Whatever it is, there is no traceback without --debug, nothing half-written, and the next good run works.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from components import artifacts
from components.external import versions
from pipelines.local import main, only_run_in
from tests.conftest import PROJECT
from tests.pipelines.fakes import UNTUNED as STEPS

CONFIG = str(PROJECT / "configs/chicago_taxi.yaml")
SMALL = (
    "train.epochs=3",
    "train.global_batch_size=32",
    "evaluate.thresholds=[{metric: auc, min: 0.2}]",
    "compress.formats=[]",
    "export.formats=[]",
    "verify.latency_rounds=5",
    "verify.num_server_examples=16",
)
Rows = list[list[str]]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    shown: str
    error: str


class Place:
    """A folder with the data, the artifacts and the pushed models of one user."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.runs, self.run_dir = folder / "runs", folder / "runs/chicago_taxi"
        self.pushed = folder / "serving_models/chicago_taxi"
        self.data = folder / "trips.csv"

    def arguments(self, *arguments: str) -> list[str]:
        """A command line; later overrides win."""
        own = [f"data.path={self.data}", f"push.destination={self.folder / 'serving_models'}", *SMALL]
        return [CONFIG, *own, "--runs-dir", str(self.runs), *arguments]

    def run(self, *arguments: str) -> Outcome:
        """Run the command in this process."""
        self._capture.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main(self.arguments(*arguments), prog_name="local")
        captured = self._capture.readouterr()
        return Outcome(int(left.value.code or 0), captured.out, captured.err)

    def start(self) -> subprocess.Popen[str]:
        """Start the command in a process of its own."""
        command = [sys.executable, "-m", "pipelines.local", *self.arguments()]
        return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fails(self, *arguments: str, code: int, message: str) -> None:
        """Run the command: it ends with this code and message, no traceback, and leaves nothing half-written."""
        outcome = self.run(*arguments)
        assert outcome.code == code, outcome
        assert message in outcome.error
        assert outcome.error.startswith("Error: ")
        assert "Traceback" not in outcome.error
        assert "defect" not in outcome.error
        self.assert_whole()

    def assert_whole(self) -> None:
        """Every artifact is what its manifest says, and nothing else is left; checkpoints may wait for the next run."""
        found = {path.name for path in self.run_dir.glob("*")} if self.run_dir.exists() else set()
        assert {name for name in found if name.startswith(".")} <= {".lock", ".model.scratch"}
        for step in STEPS:
            if step.output in found:
                artifacts.open_artifact(self.run_dir / step.output, step=step.name)
        if self.pushed.exists():
            assert all((path / "saved_model.pb").is_file() for path in self.pushed.iterdir())


@pytest.fixture(scope="session")
def trips() -> Rows:
    """A header and some hundred real trips."""
    with gzip.open(PROJECT / "configs/data/chicago_taxi.csv.gz", "rt", newline="") as file:
        return [row for row, _ in zip(csv.reader(file), range(501), strict=False)]


def as_csv(rows: Rows) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


@pytest.fixture
def place(tmp_path: Path, trips: Rows, capsys: pytest.CaptureFixture[str]) -> Place:
    place = Place(tmp_path, capsys)
    place.data.write_bytes(as_csv(trips))
    return place


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory, trips: Rows) -> Path:
    """A run in which nothing went wrong, to copy and to compare with."""
    folder = tmp_path_factory.mktemp("good")
    place = Place(folder, None)  # type: ignore[arg-type]
    place.data.write_bytes(as_csv(trips))
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as left:
        main.main(place.arguments(), prog_name="local")
    assert left.value.code == 0
    return folder


@pytest.fixture
def after_good_run(place: Place, good_run: Path) -> Place:
    """A folder in which a good run has trained a model; nothing is pushed from there."""
    place.data = good_run / "trips.csv"
    for name in ("examples", "statistics", "transform", "model"):
        shutil.copytree(good_run / "runs/chicago_taxi" / name, place.run_dir / name)
    return place


@pytest.fixture
def after_proof(place: Place, good_run: Path) -> Place:
    """A folder in which a good run has gone as far as the proof."""
    place.data = good_run / "trips.csv"
    shutil.copytree(good_run / "runs", place.runs, ignore=shutil.ignore_patterns("pushed", "monitoring"))
    return place


def test_the_next_good_run_works_and_reuses_what_was_whole(place: Place) -> None:
    good = place.data.read_bytes()
    place.data.write_bytes(os.urandom(3000))
    place.fails(code=1, message="cannot be read")
    place.data.write_bytes(good)
    place.fails("transform.features.fare.input=fair", code=2, message="no feature 'fair'. Did you mean 'fare'?")
    outcome = place.run("--until", "transform")
    assert outcome.code == 0, outcome
    assert outcome.shown.count("reused") == 2


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("x.csv", lambda _: b"", "x.csv is empty. Delete it or write it again."),
        ("x.csv", lambda data: data[: data.index(b"\n") + 1], "x.csv holds no rows."),
        ("x.csv", lambda _: bytes(range(256)) * 9, "x.csv cannot be read"),
        (
            "x.csv",
            lambda data: data.replace(b"Cash", b"Esp\xe8ces"),
            "text that is not in UTF-8 needs data.args.encoding",
        ),
        ("x.csv", lambda data: data + b"1,2,3\n", "line 502 has 3 fields, the first line has 19"),
        ("x.csv", lambda data: data.replace(b",", b";"), "set data.args.delimiter?"),
        ("x.csv", gzip.compress, "x.csv cannot be read"),
        ("x.csv.gz", lambda data: data, "x.csv.gz is cut off, damaged or not gzipped"),
        ("x.csv.gz", lambda data: gzip.compress(data)[:-3000], "x.csv.gz is cut off, damaged or not gzipped"),
        ("x.csv.gz", lambda data: gzip.compress(data)[:-6], "x.csv.gz is cut off, damaged or not gzipped"),
        ("x.csv.gz", lambda data: flipped(gzip.compress(data), -6), "Copy it again"),
    ],
)
def test_a_file_that_is_no_csv(place: Place, name: str, damage: Callable[[bytes], bytes], message: str) -> None:
    file = place.folder / name
    file.write_bytes(damage(place.data.read_bytes()))
    place.fails(f"data.path={file}", code=1, message=message)


def test_a_path_that_is_no_file(place: Place) -> None:
    (place.folder / "empty").mkdir()
    place.fails(f"data.path={place.folder / 'empty'}", code=1, message="empty holds no file")
    place.fails("data.path=/nowhere/x.csv", code=1, message="data.path: there is no file /nowhere/x.csv")
    place.fails(f"data.path={'x' * 400}", code=1, message="cannot be read: File name too long")
    place.fails("data.path=/proc/self/mem", code=1, message="data.path: /proc/self/mem cannot be read: Input/output")


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["data.label=big_tiper"], 1, "data.label: the data has no column 'big_tiper'. Did you mean 'big_tipper'?"),
        (["data.drop=[tipz]"], 1, "data.drop: the data has no column 'tipz'. Did you mean 'tips'?"),
        (["data.split={method: column, column: compani}"], 1, "data.split.column: the data has no column 'compani'."),
        (["data.split={method: column, column: payment_type}"], 1, "which names no split. Use train, validation"),
        (["data.split.key=[compani]"], 1, "data.split.key: the data has no column 'compani'. Did you mean 'company'?"),
        (["transform.features.fare.input=fair"], 2, "transform.features.fare: there is no feature 'fair'."),
        (["transform.features.company={op: text, input: compani}"], 2, "op text reads 'compani', which the data lacks"),
        (["evaluate.slices=[payment_typ]"], 2, "evaluate.slices: 'payment_typ' is no string or integer feature. Did"),
        (["evaluate.slices=[fare]"], 2, "evaluate.slices: 'fare' is no string or integer feature."),
        (["data.split.validation=0"], 1, "The validation split is empty (500 rows were read): raise data.split.val"),
        (["data.split.test=0"], 1, "The test split is empty (500 rows were read): raise data.split.test"),
        (["train.global_batch_size=9999"], 1, "fewer than train.global_batch_size (9999). Lower it or bring more"),
        (["model.name=no.such:build"], 2, "model.name: no module 'no' for 'no.such:build'"),
        (["model.name=models.tabular:biuld"], 2, "has no 'biuld'. Did you mean 'build'?"),
        (
            ["model.args={hiden_dims: [8]}"],
            2,
            "model.args of model 'tabular': got an unexpected keyword argument 'hiden",
        ),
        (["model.args={hiden_dims: [8]}"], 2, "Did you mean 'hidden_dims'?"),
        (["model.args={hidden_dims: [-3]}"], 2, "hidden_dims[0] must be an integer of 1 or more, received -3"),
        (["data.source=no_such:rows"], 2, "data.source: no module 'no_such'"),
        (["data.args={delimitr: ';'}"], 2, "Did you mean 'delimiter'?"),
        (["data.path=null"], 2, "data.path: this source needs a file, folder or glob."),
        (["validate.schema_path=/nowhere.yaml"], 2, "validate.schema_path: /nowhere.yaml cannot be read"),
    ],
)
def test_settings_that_do_not_fit_the_data(place: Place, overrides: list[str], code: int, message: str) -> None:
    place.fails(*overrides, "--until", "train", code=code, message=message)
    assert not (place.run_dir / "model").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=tabulr", "model.name: there is no 'tabulr'. Did you mean 'tabular'?"),
        ("data.source=cvs", "data.source: there is no 'cvs'. Did you mean 'csv'?"),
        ("data.split={validation: 0.5, test: 0.5}", "validation + test must be below 1"),
        ("data.classes=[yes, 'yes']", "classes must be two or more different names, received ['yes', 'yes']"),
        ("data.classes=[yes]", "classes must be two or more different names"),
        ("data.task=regression", "regression has no classes: leave out 'classes'"),
        ("evaluate.thresholds.0.metric=acc", "evaluate.thresholds.0.metric: a binary task has no metric 'acc'."),
        ("evaluate.champion.metric=rmse", "evaluate.champion.metric: a binary task has no metric 'rmse'. Known: acc"),
        ("train.early_stopping.metric=aucc", "a binary task has no metric 'aucc'. Did you mean 'auc'?"),
        ("verify={metric: rmse}", "verify.metric: a binary task has no metric 'rmse'"),
    ],
)
def test_what_the_config_alone_shows_to_be_wrong_starts_nothing(place: Place, override: str, message: str) -> None:
    place.fails(override, code=2, message=message)
    assert not place.runs.exists()


def with_label(trips: Rows, label: Callable[[int, str], str]) -> bytes:
    at = trips[0].index("big_tipper")
    return as_csv([trips[0], *([*row[:at], label(n, row[at]), *row[at + 1 :]] for n, row in enumerate(trips[1:]))])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (
            lambda n, was: "2" if n == 5 else was,
            "have a label that is no class: 2; with 2 data.classes, labels are 0 to",
        ),
        (lambda n, was: "-1" if n == 5 else was, "1 rows have a label that is no class: -1"),
        (
            lambda n, was: "maybe" if n == 5 else {"0": "no"}.get(was, "yes"),
            "no class: 'maybe'; data.classes are 'no', 'y",
        ),
        (lambda n, was: "" if n == 5 else was, "rows have no label (it is absent, empty or NaN). Fill it in"),
        (
            lambda n, was: "NaN" if n == 5 else was,
            "rows have no label (it is absent, empty or NaN). Fill it in",
        ),
        (lambda n, was: f"{was}.0", "the label is a fractional number, binary needs whole numbers or strings. Write"),
        (lambda n, was: "0", "train split, 'big_tipper': every row is of the one class 0."),
        (lambda n, was: "", "rows have no label"),
    ],
)
def test_labels_that_cannot_be_learnt(
    place: Place, trips: Rows, label: Callable[[int, str], str], message: str
) -> None:
    place.data.write_bytes(with_label(trips, label))
    place.fails(code=1, message=message)
    assert not (place.run_dir / "statistics").exists()


def test_a_number_column_with_one_word_in_it(place: Place, trips: Rows) -> None:
    at = trips[0].index("fare")
    rows = [list(row) for row in trips]
    rows[9][at] = "ten"
    place.data.write_bytes(as_csv(rows))
    place.fails(code=2, message="'fare' is of type string. A CSV column is string as soon as one value is no number")


def test_too_few_rows(place: Place, trips: Rows) -> None:
    place.data.write_bytes(as_csv(trips[:4]))
    place.fails(code=1, message="split is empty (3 rows were read)")


def test_debug_shows_the_traceback(place: Place) -> None:
    outcome = place.run("data.label=nothing", "--debug")
    assert outcome.code == 1
    assert "Traceback (most recent call last)" in outcome.error
    assert "Error: data.label: the data has no column 'nothing'" in outcome.error


def test_a_loss_that_is_no_number_leaves_no_model(after_good_run: Place) -> None:
    after_good_run.fails(
        "train.optimizer.learning_rate=1e30",
        "--until",
        "train",
        code=1,
        message="Training went to NaN or Inf at step 2 of epoch 1",
    )


# Where the disk gives out


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let writes beyond this size fail, in TensorFlow's C++, too; anyone may ask for it, unlike for a small disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_examples(place: Place) -> None:
    with largest_file(30_000):
        place.fails(code=1, message=f"No space left on the disk while writing {place.run_dir / 'examples'}")
    summary = json.loads((place.run_dir / "summary.json").read_text())
    assert summary["steps"][0]["state"] == "failed"
    assert place.run("--until", "ingest").code == 0


def test_no_room_for_the_model(after_good_run: Place) -> None:
    place = after_good_run
    with largest_file(30_000):
        place.fails("seed=0", "--force", "train", code=1, message="No space left on the disk while writing")
    before = artifacts.read_manifest(place.run_dir / "model").digest
    assert place.run("--force", "train", "--until", "train").code == 0
    assert artifacts.read_manifest(place.run_dir / "model").digest == before


def test_no_room_for_the_pushed_model(after_proof: Place) -> None:
    place = after_proof
    with largest_file(30_000):
        place.fails(code=1, message=f"No space left on the disk while writing {place.pushed}")
    assert not versions(place.pushed)
    (place.pushed / ".push-1").mkdir()
    assert place.run("--until", "push").code == 0
    assert [path.name for path in place.pushed.iterdir()] == ["1"]


def test_a_disk_that_is_full(place: Place) -> None:
    """The real thing, where mounting one is allowed; not even the summary can be written then."""
    place.runs.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "none", place.runs], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        place.fails(code=1, message=f"No space left on the disk while writing {place.run_dir / 'examples'}")
    finally:
        subprocess.run(["umount", "--lazy", place.runs], check=True)


def test_a_destination_that_is_a_file(after_proof: Place) -> None:
    place = after_proof
    (place.folder / "serving_models").write_text("in the way")
    place.fails(code=1, message="serving_models is a file, but a folder is needed there.")


def test_a_runs_dir_that_is_a_file(place: Place) -> None:
    place.runs.write_text("in the way")
    outcome = place.run()
    assert outcome.code == 1
    assert f"Error: {place.runs} is a file, but a folder is needed there. Move it, or" in outcome.error


def test_what_one_may_not_read_or_write(place: Place) -> None:
    """To root every door is open, so root gives up that right first."""
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"]).returncode):
        pytest.skip("root cannot give up its rights here")
    closed = place.folder / "closed"
    closed.mkdir()
    (closed / "x.csv").write_bytes(place.data.read_bytes())
    secret = place.folder / "secret.csv"
    secret.touch()
    secret.chmod(0)
    closed.chmod(0)
    runs = closed / "runs"
    attempts = {
        f"data.path={secret}": f"data.path: {secret} cannot be read: Permission denied. Change its owner or mode",
        f"data.path={closed}": f"data.path: {closed} cannot be read: Permission denied. Change its owner or mode",
        f"--runs-dir={runs}": f"No permission to use {runs / 'chicago_taxi'}: Permission denied. Change its owner",
    }
    code = "import sys\nfrom pipelines.local import main\nfor args in eval(sys.argv[1]):\n"
    code += "    try: main.main(args)\n    except SystemExit as left: assert left.code == 1"
    commands = repr([place.arguments(argument) for argument in attempts])
    try:
        command = [*prefix, sys.executable, "-c", code, commands]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    finally:
        closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stderr.splitlines(), attempts.values(), strict=True):
        assert line.startswith(f"Error: {message}")


# Runs that meet, are damaged or are killed


def test_two_runs_at_once(place: Place) -> None:
    with only_run_in(place.run_dir):
        outcome = place.run()
    assert outcome.code == 1
    assert f"Another run (process {os.getpid()}) is using {place.run_dir}. Wait for it to end, or" in outcome.error


def test_a_damaged_artifact_is_made_again_or_refused_by_who_reads_it(after_good_run: Place) -> None:
    place = after_good_run
    (place.run_dir / "statistics/manifest.json").unlink()
    outcome = place.run("--until", "train", "--explain")
    assert outcome.code == 0
    assert "is incomplete (it has no manifest)" in outcome.shown
    assert outcome.shown.count("reused") == 3

    shard = next((place.run_dir / "examples/train").iterdir())
    shard.write_bytes(flipped(shard.read_bytes(), 500))
    refused = place.run("--force", "train", "--until", "train")
    assert refused.code == 1
    assert f"{shard.relative_to(place.run_dir / 'examples')} is not what was written. Delete it and" in refused.error
    shutil.rmtree(place.run_dir / "examples")
    again = place.run("--until", "train")
    assert again.code == 0
    assert again.shown.count("reused") == 3


def gated_states(place: Place) -> list[str]:
    steps = json.loads((place.run_dir / "summary.json").read_text())["steps"]
    return [step["state"] for step in steps[-sum(step.gated for step in STEPS) :]]


def test_a_model_below_its_threshold_is_not_pushed(after_good_run: Place) -> None:
    place = after_good_run
    outcome = place.run("evaluate.thresholds=[{metric: auc, min: 0.999}]")
    assert outcome.code == 3
    assert "at least 0.999" in outcome.shown
    assert gated_states(place) == ["skipped"] * 7
    assert not place.pushed.exists()
    place.assert_whole()


def test_a_model_worse_than_the_champion_is_not_pushed(after_good_run: Place, good_run: Path) -> None:
    place = after_good_run
    shutil.copytree(good_run / "serving_models", place.folder / "serving_models")
    outcome = place.run("train.optimizer.learning_rate=1e-9", "evaluate.champion={metric: loss, min_improvement: 0}")
    assert outcome.code == 3, outcome
    assert "of champion version 1: improvement -" in outcome.shown
    assert gated_states(place) == ["skipped"] * 7
    assert versions(place.pushed) == [1]
    place.assert_whole()


def wait_for(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_run_ended_anywhere_goes_on_and_ends_like_one_that_was_not(place: Place, good_run: Path) -> None:
    endings = [
        (".examples.tmp-*/train/.part-*", signal.SIGKILL, -signal.SIGKILL),
        (".model.tmp-*", signal.SIGINT, 130),
        (".model.scratch/*/checkpoints/ckpt-*.index", signal.SIGKILL, -signal.SIGKILL),
        (".exported.tmp-*", signal.SIGTERM, 130),
    ]
    for pattern, number, code in endings:
        with place.start() as process:
            wait_for(process, place.run_dir, pattern)
            process.send_signal(number)
            _, error = process.communicate()
        assert process.returncode == code, error
        assert "Traceback" not in error
        if code == 130:
            assert error == "Interrupted. Run the same command again: it goes on from the last whole step.\n"
            assert json.loads((place.run_dir / "summary.json").read_text())["exit_code"] == 130
            place.assert_whole()
        assert not place.pushed.exists()

    outcome = place.run()
    assert outcome.code == 0, outcome
    assert outcome.shown.count("reused") == 7
    place.assert_whole()
    for name in ("examples", "statistics", "transform", "model", "evaluation"):
        digests = [
            artifacts.read_manifest(runs / name).digest for runs in (place.run_dir, good_run / "runs/chicago_taxi")
        ]
        assert digests[0] == digests[1], name
    assert versions(place.pushed) == [1]
