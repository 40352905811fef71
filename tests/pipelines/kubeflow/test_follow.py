"""Waiting for a run: what is shown of its steps, and what is said of a failure."""

from __future__ import annotations

import io
from typing import Any

import kfp_server_api as api
import pytest
from rich.console import Console

from components.errors import HeadraceError, NotBlessedError
from pipelines.kubeflow import follow as module
from pipelines.kubeflow import kfp_api
from pipelines.kubeflow.kfp_api import Access
from tests.pipelines import fake_kfp, fakes
from tests.pipelines.fake_kfp import FakeApi


def _follow(server: FakeApi, console: Console | None = None) -> list[str]:
    console = console or fakes.quiet()
    client = kfp_api.connect(Access(server.url))
    module.follow(client, "r-1", console=console, poll_seconds=0.01)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def _failure(server: FakeApi) -> str:
    with pytest.raises(HeadraceError) as raised:
        _follow(server)
    return str(raised.value)


def test_each_change_of_a_step_is_a_line(kfp_server: FakeApi) -> None:
    pipeline = fake_kfp.spec_of("ingest", "validate", "evaluate", "push")
    kfp_server.runs = [
        fake_kfp.run("PENDING", pipeline=pipeline),
        fake_kfp.run("RUNNING", pipeline=pipeline, **{"ingest": "RUNNING", "ingest-driver": "SUCCEEDED"}),
        fake_kfp.run("RUNNING", pipeline=pipeline, validate="RUNNING", ingest="SUCCEEDED", executor="SUCCEEDED"),
        (503, "gone for a moment", "text/plain"),
        *[fake_kfp.CUT] * 6,  # urllib3 asks again by itself, but not so often
        fake_kfp.run("SUCCEEDED", pipeline=pipeline, **dict.fromkeys(("ingest", "evaluate", "push"), "SUCCEEDED")),
    ]
    assert [" ".join(line.split()) for line in _follow(kfp_server)] == [
        "ingest running",
        "ingest succeeded",
        "validate running",
        "evaluate succeeded",
        "push succeeded",
    ]


def test_on_a_terminal_there_is_one_table(kfp_server: FakeApi) -> None:
    kfp_server.runs = [
        fake_kfp.run("RUNNING", pipeline=fake_kfp.spec_of("ingest"), ingest="RUNNING"),
        fake_kfp.run("SUCCEEDED", pipeline=fake_kfp.spec_of("ingest"), ingest="SUCCEEDED"),
    ]
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=60, color_system=None)
    before, after = "\n".join(_follow(kfp_server, console)).split("\x1b[1A", 1)  # up again, over the table before
    assert "ingest" in before and "running" in before and "succeeded" not in before
    assert "succeeded" in after and "running" not in after


def test_a_step_that_a_loop_runs_is_counted(kfp_server: FakeApi) -> None:
    run = fake_kfp.run("SUCCEEDED", train="SUCCEEDED")
    trial = api.V2beta1PipelineTaskDetail(display_name="train", state="FAILED")
    run.run_details.task_details += [trial, run.run_details.task_details[0]]
    kfp_server.runs = [run]
    assert [" ".join(line.split()) for line in _follow(kfp_server)] == ["train 1 failed, 2 succeeded"]


def test_a_task_that_is_shown_as_a_step_has_its_name(kfp_server: FakeApi) -> None:
    run = fake_kfp.run("FAILED", **{"train-on-cluster": "FAILED"})
    run.pipeline_spec["root"]["dag"]["tasks"]["train-on-cluster"]["taskInfo"] = {"name": "train"}
    kfp_server.runs = [run]
    kfp_server.nodes = [fake_kfp.node("train-on-cluster", "Failed", "OOMKilled", number=1)]
    message = _failure(kfp_server)
    assert "\n  train: OOMKilled\n" in message
    assert "headrace replay r-1 train --host" in message
    assert "train-on-cluster" not in message


def test_the_pipeline_of_an_uploaded_version_has_the_names_of_the_steps(kfp_server: FakeApi) -> None:
    run = fake_kfp.run("SUCCEEDED", ingest="SUCCEEDED")
    kfp_server.versions = [api.V2beta1PipelineVersion(pipeline_version_id="v-1", pipeline_spec=run.pipeline_spec)]
    run.pipeline_spec = None
    run.pipeline_version_reference = api.V2beta1PipelineVersionReference("p-1", "v-1")
    kfp_server.runs = [run]
    assert _follow(kfp_server) == ["ingest     succeeded"]


def test_a_model_that_is_not_blessed_is_another_error(kfp_server: FakeApi) -> None:
    kfp_server.runs = [fake_kfp.run("SUCCEEDED", evaluate="SUCCEEDED", push="SKIPPED")]
    with pytest.raises(NotBlessedError, match="not blessed"):
        _follow(kfp_server)


def _failed_run(server: FakeApi, *nodes: dict[str, Any]) -> None:
    server.runs = [fake_kfp.run("FAILED", ingest="SUCCEEDED", train="FAILED", executor="FAILED", root="FAILED")]
    server.nodes = [fake_kfp.node("ingest", "Succeeded", number=1), *nodes]


def test_a_failure_is_told_with_the_end_of_the_log(kfp_server: FakeApi) -> None:
    _failed_run(
        kfp_server,
        fake_kfp.node("train", "Failed", "Error (exit code 1)", number=2),
        fake_kfp.node("train", "Failed", "OOMKilled (exit code 137)", number=3, part="retried"),
    )
    kfp_server.logs = {fake_kfp.pod(3): "".join(f"line {number}\n" for number in range(50))}
    assert _failure(kfp_server).split("\n") == [
        "Run r-1 ended as FAILED.",
        "  train: OOMKilled (exit code 137)",
        f"  The last lines of its log (pod {fake_kfp.pod(3)}):",
        *(f"    line {number}" for number in range(20, 50)),
        f"  To run it here: headrace replay r-1 train --host {kfp_server.url}",
        f" See {kfp_server.url}/#/runs/details/r-1",
    ]
    (query,) = kfp_server.queries("/k8s/pod/logs")
    assert query == {"podname": fake_kfp.pod(3), "podnamespace": "team-a", "runid": "r-1"}


def test_the_log_is_had_from_the_api_where_there_is_no_ui(kfp_server: FakeApi) -> None:
    _failed_run(kfp_server, fake_kfp.node("train", "Failed", number=2))
    kfp_server.answers["GET /k8s/pod/logs"] = 200, "<html>Log in</html>", "text/html"
    kfp_server.api_logs = {fake_kfp.pod(2): "by way of the API\n"}
    message = _failure(kfp_server)
    assert "by way of the API" in message
    assert "html" not in message


def test_without_a_log_kubectl_is_named(kfp_server: FakeApi) -> None:
    _failed_run(kfp_server, fake_kfp.node("train", "Failed", "OOMKilled (exit code 137)", number=2))
    message = _failure(kfp_server)
    assert "train: OOMKilled (exit code 137)\n  Kubeflow does not give its log (Not Found)." in message
    assert f"kubectl logs -n team-a {fake_kfp.pod(2)} -c main" in message


def test_an_api_without_the_workflow_still_tells_the_steps(kfp_server: FakeApi) -> None:
    _failed_run(kfp_server)
    kfp_server.nodes = []
    kfp_server.runs[0].run_details.task_details[1].error = api.GoogleRpcStatus(code=13, message="no such image")
    assert _failure(kfp_server).startswith("Run r-1 ended as FAILED.\n  train: no such image\n")


def test_a_cancelled_run_ends_the_wait(kfp_server: FakeApi) -> None:
    kfp_server.runs = [fake_kfp.run("CANCELING"), fake_kfp.run("CANCELED", train="CANCELED")]
    assert _failure(kfp_server) == f"Run r-1 ended as CANCELED. See {kfp_server.url}/#/runs/details/r-1"


def test_an_api_that_stays_away_ends_the_wait(kfp_server: FakeApi) -> None:
    kfp_server.runs = [(503, "gone", "text/plain")]
    assert "answered 503" in _failure(kfp_server)
    asked = [path for _, path, *_ in kfp_server.received if path == "/apis/v2beta1/runs/r-1"]
    assert len(asked) == kfp_api.MAX_FAILED_POLLS
