"""Versions come and go while requests run; with fake models, so without TensorFlow."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import served_model, versions
from serving.errors import Code, ServingError
from serving.manager import ModelManager
from serving.served_model import ModelConfig, ServedModel, State
from serving.versions import all_versions, find_versions, latest, specific
from tests.serving.waiting import wait_for


class FakeModel:
    """A model whose file says what it is; it notes when it is closed."""

    def __init__(self, path: Path) -> None:
        self.content = (path / "saved_model.pb").read_text()
        if self.content.startswith("broken"):
            raise ServingError(Code.INVALID_ARGUMENT, f"cannot load: {self.content}")
        if self.content == "crash":
            raise RuntimeError("boom")
        self.signatures: dict[str, Any] = {}
        self.is_closed = False

    def run(self, signature_name: str, inputs: Any, outputs: Any = (), context: Any = None) -> Any:
        assert not self.is_closed, "a request reached a model that was unloaded"
        return {"content": self.content}

    def close(self) -> None:
        self.is_closed = True


def push(base_path: Path, version: int | str, content: str = "good") -> Path:
    path = base_path / str(version)
    path.mkdir(parents=True, exist_ok=True)
    (path / "new").write_text(content)
    (path / "new").replace(path / "saved_model.pb")  # at once: nobody reads half of it
    return path


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    push(tmp_path, 1)
    return tmp_path


@pytest.fixture
def model(base_path: Path) -> Iterator[ServedModel]:
    served = ServedModel(ModelConfig("m", base_path, latest(1), {}), FakeModel)
    served.refresh()
    yield served
    served.close()


def states(model: ServedModel) -> dict[int, str]:
    return {version.number: version.state.name for version in model.statuses()}


def test_find_versions_takes_only_complete_numeric_directories(tmp_path: Path) -> None:
    push(tmp_path, 7)
    push(tmp_path, "00000012")
    push(tmp_path, "latest")
    push(tmp_path, "-3")
    push(tmp_path, "²")
    (tmp_path / "8").mkdir()
    (tmp_path / "9").write_text("a file")
    assert set(find_versions(tmp_path)) == {7, 12}


def test_find_versions_takes_single_files_and_text(tmp_path: Path) -> None:
    for number, name in enumerate(["saved_model.pbtxt", "model.tflite", "model.onnx", "other.tflite"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).touch()
    (tmp_path / "1" / "variables").mkdir()  # then model.tflite is a part of a SavedModel that is still being copied
    assert set(find_versions(tmp_path)) == {0, 2}


def test_find_versions_with_odd_names_and_links(tmp_path: Path) -> None:
    release = push(tmp_path / "releases", "abc")
    (tmp_path / "5").symlink_to(release)
    (tmp_path / "6").symlink_to("6")
    (tmp_path / "7").symlink_to("gone")
    push(tmp_path, "001")
    push(tmp_path, "1")
    push(tmp_path, "002")
    push(tmp_path, 2**63)
    push(tmp_path, 2**63 - 1)
    names = {number: path.name for number, path in find_versions(tmp_path).items()}
    assert names == {1: "1", 2: "002", 5: "5", 2**63 - 1: str(2**63 - 1)}


@pytest.fixture
def failing_stat(monkeypatch: pytest.MonkeyPatch) -> dict[Path, OSError]:
    """Directories of which the disk gives nothing but an error."""
    failures: dict[Path, OSError] = {}
    whole = os.stat

    def stat(path: Any, **arguments: Any) -> Any:
        for parent in Path(path).parents if isinstance(path, Path | str) else ():
            if parent in failures:
                raise failures[parent]
        return whole(path, **arguments)

    monkeypatch.setattr(os, "stat", stat)
    return failures


def test_hiccup_of_the_disk_is_not_taken_for_the_end_of_a_version(
    base_path: Path, model: ServedModel, failing_stat: dict[Path, OSError], caplog: pytest.LogCaptureFixture
) -> None:
    push(base_path, 2)
    model.refresh()
    failing_stat[base_path / "2"] = OSError(errno.ESTALE, "Stale file handle", str(base_path / "2"))
    model.refresh()
    assert states(model) == {1: "END", 2: "AVAILABLE"}
    assert f"Stale file handle: '{base_path / '2'}'" in caplog.text
    failing_stat.clear()
    push(base_path, 3)
    model.refresh()
    assert states(model) == {1: "END", 2: "END", 3: "AVAILABLE"}


def test_version_that_may_not_be_read_is_reported(
    base_path: Path, model: ServedModel, failing_stat: dict[Path, OSError]
) -> None:
    push(base_path, 2, "broken: permission denied")
    failing_stat[base_path / "2"] = PermissionError(errno.EACCES, "Permission denied")
    model.refresh()
    assert states(model) == {1: "AVAILABLE", 2: "END"}
    assert "permission denied" in str(model.statuses()[0].error)


def test_policies() -> None:
    assert latest(2)([3, 1, 2]) == {2, 3}
    assert specific(1, 5)([1, 2, 3]) == {1}
    assert all_versions([1, 2]) == {1, 2}


def test_new_version_is_loaded_before_the_old_one_goes(base_path: Path, model: ServedModel) -> None:
    push(base_path, 2)
    seen = []
    original = model._load

    def load(path: Path) -> Any:
        with model.lease(None) as version:
            seen.append((version.number, states(model)))
        return original(path)

    model._load = load
    model.refresh()
    assert seen == [(1, {2: "LOADING", 1: "AVAILABLE"})]
    assert states(model) == {2: "AVAILABLE", 1: "END"}
    with model.lease(None) as version:
        assert version.number == 2


def test_request_in_flight_finishes_on_the_old_version(base_path: Path, model: ServedModel) -> None:
    with model.lease(None) as first, model.lease(1) as second:
        assert first is second
        held = first.loaded
        push(base_path, 2)
        model.refresh()
        assert states(model) == {2: "AVAILABLE", 1: "UNLOADING"}
        assert first.loaded.run("serving_default", {}) == {"content": "good"}
        with pytest.raises(ServingError, match=r"Servable not found for request: Specific\(m, 1\)"), model.lease(1):
            pass
    assert held.is_closed  # type: ignore[attr-defined]
    assert states(model) == {2: "AVAILABLE", 1: "END"}


def test_unloading_waits_for_the_last_of_many_requests(base_path: Path, model: ServedModel) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def request() -> None:
        while not stop.is_set():
            try:
                with model.lease(None) as version:
                    time.sleep(0.001)
                    version.loaded.run("serving_default", {})
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=request) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(2, 12):
        push(base_path, number)
        model.refresh()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert states(model) == {11: "AVAILABLE"} | dict.fromkeys(range(1, 11), "END")


def test_broken_version_leaves_the_old_one_serving(
    base_path: Path, model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    push(base_path, 2, "broken file")
    model.refresh()
    assert states(model) == {2: "END", 1: "AVAILABLE"}
    assert "version 2 does not load: INVALID_ARGUMENT: cannot load: broken file" in caplog.text
    error = model.statuses()[0].error
    assert error is not None
    assert error.code is Code.INVALID_ARGUMENT
    caplog.clear()
    model.refresh()
    assert caplog.text == "", "an unchanged broken version must not be loaded again at each look"


def test_unexpected_exception_while_loading_is_an_error_of_the_version(base_path: Path, model: ServedModel) -> None:
    push(base_path, 2, "crash")
    model.refresh()
    error = model.statuses()[0].error
    assert error is not None
    assert str(error) == "INTERNAL: RuntimeError: boom"
    assert states(model) == {2: "END", 1: "AVAILABLE"}


def test_broken_version_is_tried_again_when_it_is_mended(base_path: Path, model: ServedModel) -> None:
    path = push(base_path, 2, "broken")
    model.refresh()
    (path / "saved_model.pb").write_text("mended")
    model.refresh()
    assert states(model) == {2: "AVAILABLE", 1: "END"}
    assert model.statuses()[0].error is None


def test_version_whose_files_change_while_they_are_read_is_read_again(base_path: Path) -> None:
    copies = iter(["half", "whole"])
    loaded: list[FakeModel] = []

    def load(path: Path) -> FakeModel:
        loaded.append(FakeModel(path))
        if (content := next(copies, None)) is not None:
            (path / "assets").write_text(content)
        return loaded[-1]

    served = ServedModel(ModelConfig("m", base_path, latest(1), {}), load)
    for is_last in (False, False, True):
        assert not served.statuses() or str(served.statuses()[0].error) == (
            f"UNAVAILABLE: the files of {base_path / '1'} changed while they were read"
        )
        served.refresh()
        assert [model.is_closed for model in loaded] == [True] * (len(loaded) - is_last) + [False] * is_last
    assert states(served) == {1: "AVAILABLE"}
    assert len(loaded) == 3


def test_link_that_points_elsewhere_counts_as_a_change(base_path: Path, model: ServedModel) -> None:
    for name, content in (("bad", "broken"), ("good", "better")):
        os.utime(push(base_path.parent / "releases", name, content) / "saved_model.pb", (0, 0))
    (base_path / "2").symlink_to(base_path.parent / "releases" / "bad")
    model.refresh()
    assert states(model) == {1: "AVAILABLE", 2: "END"}
    (base_path / "2").unlink()
    (base_path / "2").symlink_to(base_path.parent / "releases" / "good")
    model.refresh()
    assert states(model) == {1: "END", 2: "AVAILABLE"}


def test_error_of_a_version_does_not_keep_what_was_loaded_before_it(base_path: Path) -> None:
    class Weights:
        pass

    kept: list[weakref.ref[Weights]] = []

    def load(path: Path) -> FakeModel:
        weights = Weights()
        kept.append(weakref.ref(weights))
        try:
            raise RuntimeError("the warm-up failed")
        except RuntimeError as error:
            raise ServingError(Code.INTERNAL, str(error)) from error

    served = ServedModel(ModelConfig("m", base_path, latest(1), {}), load)
    served.refresh()
    assert str(served.statuses()[0].error) == "INTERNAL: the warm-up failed"
    assert kept[0]() is None


def test_half_copied_version_is_not_there_yet(
    base_path: Path, model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    (base_path / "2" / "variables").mkdir(parents=True)
    model.refresh()
    assert states(model) == {1: "AVAILABLE"}
    assert caplog.text == ""
    push(base_path, 2)
    model.refresh()
    assert states(model) == {2: "AVAILABLE", 1: "END"}


def test_removing_the_newest_rolls_back(base_path: Path, model: ServedModel) -> None:
    path = push(base_path, 2)
    model.refresh()
    (path / "saved_model.pb").unlink()
    model.refresh()
    assert states(model) == {2: "END", 1: "AVAILABLE"}


def test_base_path_that_disappears_is_reported_once_and_serving_goes_on(
    base_path: Path, model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    moved = base_path.rename(base_path.with_name("moved"))
    model.refresh()
    model.refresh()
    assert caplog.text.count("serving goes on as it was") == 1
    assert states(model) == {1: "AVAILABLE"}
    moved.rename(base_path)
    push(base_path, 2)
    model.refresh()
    assert states(model) == {2: "AVAILABLE", 1: "END"}


def test_poller_finds_new_versions_and_survives_surprises(base_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def policy(versions: Any) -> set[int]:
        if 99 in versions:
            raise RuntimeError("surprise")
        return latest(1)(versions)

    manager = ModelManager([ModelConfig("m", base_path, policy, {})], FakeModel, poll_wait_seconds=0.01)
    manager.start()
    surprise = push(base_path, 99)
    wait_for(lambda: "looking for new versions failed" in caplog.text)
    (surprise / "saved_model.pb").unlink()
    push(base_path, 3)
    wait_for(lambda: states(manager.models["m"]) == {3: "AVAILABLE", 1: "END"})
    manager.stop()
    assert states(manager.models["m"]) == {3: "END", 1: "END"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no version to serve, only"),
        ("broken", "could be loaded: version 1: INVALID_ARGUMENT: cannot load"),
    ],
)
def test_start_needs_a_version(tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "README").write_text("x")
    if content:
        push(tmp_path, 1, content)
    manager = ModelManager([ModelConfig("m", tmp_path, latest(1), {})], FakeModel, poll_wait_seconds=1)
    with pytest.raises(ServingError, match=message):
        manager.start()


def test_lookup_errors(base_path: Path) -> None:
    manager = ModelManager([ModelConfig("m", base_path, latest(1), {"stable": 1, "gone": 5})], FakeModel, 1)
    manager.start()
    with manager.lease("m", None, "stable") as version:
        assert (version.number, version.state) == (1, State.AVAILABLE)
    for name, number, label, code, message in [
        ("", None, None, Code.INVALID_ARGUMENT, "no name"),
        ("x", None, None, Code.NOT_FOUND, "Servable not found for request: Latest(x)"),
        ("m", 4, None, Code.NOT_FOUND, "Servable not found for request: Specific(m, 4)"),
        ("m", None, "gone", Code.NOT_FOUND, "Servable not found for request: Specific(m, 5)"),
        ("m", None, "new", Code.INVALID_ARGUMENT, "Unrecognized servable version label: new"),
    ]:
        with pytest.raises(ServingError) as raised, manager.lease(name, number, label):
            pass
        assert raised.value.code is code
        assert message in raised.value.message
    with pytest.raises(ServingError, match="Could not find version 9 of model m"):
        manager.statuses("m", 9)
    manager.stop()


@pytest.fixture
def manager(base_path: Path) -> Iterator[ModelManager]:
    running = ModelManager([ModelConfig("m", base_path, latest(1), {})], FakeModel, poll_wait_seconds=0)
    running.start()
    yield running
    running.stop()


def labelled(base_path: Path, policy: Any, **labels: int) -> ModelConfig:
    return ModelConfig("m", base_path, policy, labels)


def version_for(manager: ModelManager, label: str) -> int:
    with manager.lease("m", None, label) as version:
        return version.number


def test_reload_loads_before_it_unloads_and_moves_labels(base_path: Path, manager: ModelManager) -> None:
    push(base_path, 2)
    served = manager.models["m"]
    manager.reload([labelled(base_path, specific(1, 2), stable=1)])
    wait_for(lambda: states(served) == {1: "AVAILABLE", 2: "AVAILABLE"})
    assert version_for(manager, "stable") == 1
    manager.reload([labelled(base_path, specific(2), stable=2)])
    assert version_for(manager, "stable") == 2
    wait_for(lambda: states(served) == {1: "END", 2: "AVAILABLE"})


@pytest.mark.parametrize("allow", [False, True])
def test_label_of_a_version_that_is_not_available(base_path: Path, allow: bool) -> None:
    """Refused, unless allowed and the label is new; a refused config changes nothing."""
    manager = ModelManager(
        [labelled(base_path, latest(1), stable=1)],
        FakeModel,
        poll_wait_seconds=0,
        allow_version_labels_for_unavailable_models=allow,
    )
    manager.start()
    message = "Request to assign label to version 7 of model m, which is not currently available for inference"
    with pytest.raises(ServingError, match=message) as raised:
        manager.reload([labelled(base_path, specific(7), stable=7)])
    assert raised.value.code is Code.FAILED_PRECONDITION
    canary = [labelled(base_path, latest(1), stable=1, canary=7)]
    if allow:
        manager.reload(canary)
        with pytest.raises(ServingError, match=r"Servable not found for request: Specific\(m, 7\)"):
            version_for(manager, "canary")
    else:
        with pytest.raises(ServingError, match=message):
            manager.reload(canary)
        with pytest.raises(ServingError, match="Unrecognized servable version label: canary"):
            version_for(manager, "canary")
    assert version_for(manager, "stable") == 1
    manager.stop()


def test_reload_adds_and_takes_away_models(tmp_path: Path, base_path: Path, manager: ModelManager) -> None:
    push(tmp_path / "other", 5)
    with manager.lease("m", None, None) as held:
        manager.reload([ModelConfig("other", tmp_path / "other", latest(1), {})])
        with manager.lease("other", None, None) as version:
            assert version.number == 5
        assert states(manager.models["m"]) == {1: "UNLOADING"}
        assert held.loaded.run("serving_default", {}) == {"content": "good"}
    assert [version.state for version in manager.statuses("m", None)] == [State.END]
    with pytest.raises(ServingError, match=r"Latest\(m\)"), manager.lease("m", None, None):
        pass
    manager.reload([labelled(base_path, latest(1))])
    assert states(manager.models["m"]) == {1: "AVAILABLE"}
    assert states(manager.models["other"]) == {5: "END"}


def test_reload_refuses_a_model_without_versions_and_changes_nothing(tmp_path: Path, manager: ModelManager) -> None:
    with pytest.raises(ServingError, match="model x: the base path /nowhere cannot be listed") as raised:
        manager.reload([ModelConfig("x", Path("/nowhere"), latest(1), {})])
    assert raised.value.code is Code.NOT_FOUND
    assert states(manager.models["m"]) == {1: "AVAILABLE"}
    assert list(manager.models) == ["m"]


def test_reload_reports_a_new_model_that_does_not_load(tmp_path: Path, base_path: Path, manager: ModelManager) -> None:
    push(tmp_path / "bad", 1, "broken")
    with pytest.raises(ServingError, match=r"1 model\(s\) did not become available: \{model bad: no version") as raised:
        manager.reload([labelled(base_path, latest(1)), ModelConfig("bad", tmp_path / "bad", latest(1), {})])
    assert raised.value.code is Code.UNKNOWN
    assert states(manager.models["m"]) == {1: "AVAILABLE"}
    assert states(manager.models["bad"]) == {1: "END"}


def test_version_that_does_not_load_is_retried_while_the_old_one_serves(base_path: Path) -> None:
    tries: list[dict[int, str]] = []

    def load(path: Path) -> FakeModel:
        if path.name == "2":
            tries.append(states(manager.models["m"]))
            if len(tries) < 3:
                raise ServingError(Code.UNAVAILABLE, "disk is away")
        return FakeModel(path)

    manager = ModelManager(
        [labelled(base_path, latest(1))],
        load,
        poll_wait_seconds=0.01,
        max_num_load_retries=2,
        load_retry_interval_seconds=0.01,
    )
    manager.start()
    push(base_path, 2)
    wait_for(lambda: states(manager.models["m"]) == {1: "END", 2: "AVAILABLE"})
    assert tries == [{1: "AVAILABLE", 2: "LOADING"}] * 3
    assert manager.statuses("m", 2)[0].error is None
    manager.stop()


def test_retries_end_and_do_not_hold_up_other_models_or_the_stop(tmp_path: Path, base_path: Path) -> None:
    push(tmp_path / "other", 1)
    tries: list[Path] = []

    def load(path: Path) -> FakeModel:
        tries.append(path)
        return FakeModel(path)

    manager = ModelManager(
        [labelled(base_path, latest(1)), ModelConfig("other", tmp_path / "other", latest(1), {})],
        load,
        poll_wait_seconds=0.01,
        max_num_load_retries=1,
        load_retry_interval_seconds=3600,
    )
    manager.start()
    bad = push(base_path, 2, "broken")
    wait_for(lambda: bad in tries)
    push(tmp_path / "other", 2)
    wait_for(lambda: states(manager.models["other"]) == {1: "END", 2: "AVAILABLE"})
    assert states(manager.models["m"]) == {1: "AVAILABLE", 2: "LOADING"}
    manager.stop()
    assert tries.count(bad) == 1
    error = manager.statuses("m", 2)[0].error
    assert str(error) == "INVALID_ARGUMENT: cannot load: broken"
    with pytest.raises(ServingError, match="the server is stopping"):
        manager.reload([])


def patient_manager(base_path: Path, load: Any) -> ModelManager:
    """Looks at the disk all the time, and tries a version that does not load again in an hour."""
    return ModelManager(
        [labelled(base_path, latest(1))],
        load,
        poll_wait_seconds=0.01,
        max_num_load_retries=5,
        load_retry_interval_seconds=3600,
    )


@pytest.mark.parametrize("change", ["mended", "newer", "reloaded", "gone"])
def test_wait_for_the_next_try_ends_when_there_is_something_to_do(base_path: Path, change: str) -> None:
    manager = patient_manager(base_path, FakeModel)
    manager.start()
    bad = push(base_path, 2, "broken")
    wait_for(lambda: states(manager.models["m"]) == {1: "AVAILABLE", 2: "LOADING"})
    expected = {1: "END", 2: "AVAILABLE"}
    if change == "mended":
        push(base_path, 2)
    elif change == "newer":
        push(base_path, 3)
        expected = {1: "END", 2: "END", 3: "AVAILABLE"}
    elif change == "reloaded":
        manager.reload([labelled(base_path, specific(1))])
        expected = {1: "AVAILABLE", 2: "END"}
    else:
        (bad / "saved_model.pb").unlink()
        expected = {1: "AVAILABLE", 2: "END"}
    wait_for(lambda: states(manager.models["m"]) == expected)
    manager.stop()


def test_version_that_comes_between_the_look_and_the_load_is_not_missed(
    base_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(path: Path) -> Any:
        if path.name == "2":
            push(base_path, 3)
        return versions.fingerprint(path)

    monkeypatch.setattr(served_model, "fingerprint", fingerprint)
    manager = patient_manager(base_path, FakeModel)
    manager.start()
    push(base_path, 2, "broken")
    wait_for(lambda: states(manager.models["m"]) == {1: "END", 2: "END", 3: "AVAILABLE"})
    manager.stop()


def test_version_that_is_mended_while_it_fails_to_load_is_loaded_at_once(base_path: Path) -> None:
    def load(path: Path) -> FakeModel:
        try:
            return FakeModel(path)
        except ServingError:
            push(base_path, 2)
            raise

    manager = patient_manager(base_path, load)
    manager.start()
    push(base_path, 2, "broken")
    wait_for(lambda: states(manager.models["m"]) == {1: "END", 2: "AVAILABLE"})
    manager.stop()


def test_reload_with_another_base_path_serves_what_is_there(manager: ModelManager, tmp_path: Path) -> None:
    """Under the same numbers, and without a moment in which nothing is served."""
    push(tmp_path / "new", 1, "moved")
    with manager.lease("m", None, None) as old:
        old_model = old.model
        manager.reload([ModelConfig("m", tmp_path / "new", latest(1), {})])
        assert content_soon(manager, "moved")
        assert old.state is State.UNLOADING
        assert not old_model.is_closed, "a request still uses it"
    assert old_model.is_closed
    assert [(version.number, version.state) for version in manager.statuses("m", None)] == [(1, State.AVAILABLE)]


def test_other_base_path_that_does_not_load_leaves_the_old_one(manager: ModelManager, tmp_path: Path) -> None:
    push(tmp_path / "new", 1, "broken")
    manager.reload([ModelConfig("m", tmp_path / "new", latest(1), {})])
    assert not content_soon(manager, "never", tries=20)
    with manager.lease("m", 1, None) as version:
        assert version.loaded.run("", {}) == {"content": "good"}
    push(tmp_path / "new", 1, "mended")
    manager.reload([ModelConfig("m", tmp_path / "new", latest(1), {})])
    assert content_soon(manager, "mended")
    with pytest.raises(ServingError, match="cannot be listed"):
        manager.reload([ModelConfig("m", tmp_path / "nowhere", latest(1), {})])


def content_soon(manager: ModelManager, content: str, tries: int = 500) -> bool:
    for _ in range(tries):
        with manager.lease("m", None, None) as version:
            if version.loaded.run("", {}) == {"content": content}:
                return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(("num_threads", "patience_seconds"), [(1, 0.1), (2, 10)])
def test_so_many_versions_load_at_the_same_time(tmp_path: Path, num_threads: int, patience_seconds: float) -> None:
    together: list[Path] = []
    barrier = threading.Barrier(2)

    def load(path: Path) -> FakeModel:
        try:
            barrier.wait(timeout=patience_seconds)
            together.append(path)
        except threading.BrokenBarrierError:
            barrier.reset()
        return FakeModel(path)

    configs = [ModelConfig(name, tmp_path / name, latest(1), {}) for name in ("a", "b")]
    for config in configs:
        push(config.base_path, 1)
    manager = ModelManager(configs, load, poll_wait_seconds=0, num_load_threads=num_threads)
    manager.start()
    assert len(together) == (2 if num_threads == 2 else 0)
    manager.stop()


def test_version_that_vanishes_as_it_is_loaded_is_not_waited_for(base_path: Path) -> None:
    def load(path: Path) -> FakeModel:
        model = FakeModel(path)
        if path.name == "2":
            raise ServingError(Code.DATA_LOSS, "gone")
        return model

    manager = patient_manager(base_path, load)
    manager.start()
    watcher = manager._watchers["m"]
    on_disk = watcher._on_disk

    def vanish_first(path: Path) -> Any:
        (path / "saved_model.pb").unlink(missing_ok=True)
        return on_disk(path)

    watcher._on_disk = vanish_first  # type: ignore[method-assign]
    push(base_path, 2)
    wait_for(lambda: states(manager.models["m"]) == {1: "AVAILABLE", 2: "END"})
    manager.stop()
