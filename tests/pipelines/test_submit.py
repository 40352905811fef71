"""What is sent to Kubeflow Pipelines for a run, a recurring run and an uploaded version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kfp_server_api as api
import pytest
import yaml
from click.testing import CliRunner, Result

from pipelines.kubeflow.kfp_api import parse_pipeline
from pipelines.submit import main
from tests.pipelines import fake_kfp, fakes
from tests.pipelines.fake_kfp import FakeApi, compile_once


def _submit(server: FakeApi, *options: str) -> Result:
    return CliRunner().invoke(main, ["tiny.yaml", "--host", server.url, *options])


def _sent(server: FakeApi, kind: str = "runs") -> Any:
    (sent,) = server.bodies("POST", f"/apis/v2beta1/{kind}")
    return sent


def test_what_is_sent(kfp_server: FakeApi) -> None:
    options = ["train.epochs=3", "--image", "registry/headrace:2", "--run-name", "nightly"]
    options += [
        "--parameter",
        "data_path=s3://b/d=1.csv",
        "--pipeline-root",
        "s3://b/root",
        "--service-account",
        "runner",
    ]
    result = _submit(kfp_server, *options)
    assert result.exit_code == 0, result.output
    assert f"Run r-1: {kfp_server.url}/#/runs/details/r-1" in result.output
    sent = _sent(kfp_server)
    text = compile_once(fakes.config_of(train={"epochs": 3}), image="registry/headrace:2")
    assert sent["pipeline_spec"] == parse_pipeline(text)
    assert sent["runtime_config"] == {"parameters": {"data_path": "s3://b/d=1.csv"}, "pipeline_root": "s3://b/root"}
    assert (sent["display_name"], sent["experiment_id"], sent["service_account"]) == ("nightly", "e-1", "runner")


@pytest.mark.parametrize(("options", "name"), [((), "tiny"), (("--experiment", "spring"), "spring")])
def test_an_experiment_that_does_not_exist_is_made(kfp_server: FakeApi, options: tuple[str, ...], name: str) -> None:
    assert _submit(kfp_server, *options).exit_code == 0
    assert _sent(kfp_server, "experiments")["display_name"] == name
    assert _sent(kfp_server)["display_name"].startswith("tiny 20")


def test_an_experiment_that_exists_is_used(kfp_server: FakeApi) -> None:
    kfp_server.experiments = [api.V2beta1Experiment(experiment_id="e-7", display_name="tiny")]
    assert _submit(kfp_server).exit_code == 0
    assert kfp_server.bodies("POST", "/apis/v2beta1/experiments") == []
    assert _sent(kfp_server)["experiment_id"] == "e-7"


def test_the_namespace_is_that_of_the_experiment(kfp_server: FakeApi) -> None:
    kfp_server.multi_user = True
    assert _submit(kfp_server, "--namespace", "team-a").exit_code == 0
    assert _sent(kfp_server, "experiments")["namespace"] == "team-a"


@pytest.mark.parametrize(("state", "push", "exit_code"), [("SUCCEEDED", "SUCCEEDED", 0), ("SUCCEEDED", "SKIPPED", 3)])
def test_the_exit_code_of_waiting(kfp_server: FakeApi, state: str, push: str, exit_code: int) -> None:
    kfp_server.runs = [fake_kfp.run(state, evaluate="SUCCEEDED", push=push)]
    result = _submit(kfp_server, "--wait")
    assert result.exit_code == exit_code
    assert "evaluate   succeeded" in result.output


def test_a_failed_run_is_exit_code_1(kfp_server: FakeApi) -> None:
    kfp_server.runs = [fake_kfp.run("FAILED", train="FAILED")]
    assert _submit(kfp_server, "--wait").exit_code == 1


def test_a_recurring_run(kfp_server: FakeApi) -> None:
    options = [
        "--cron",
        "0 0 3 * * *",
        "--start-time",
        "2026-12-24T03:00:00Z",
        "--end-time",
        "2027-01-01T00:00:00+01:00",
    ]
    options += ["--catch-up", "--max-concurrency", "2", "--parameter", "data_path=d.csv", "--service-account", "runner"]
    result = _submit(kfp_server, *options, "--pipeline-root", "s3://b/root")
    assert result.exit_code == 0, result.output
    assert f"Recurring run s-1: {kfp_server.url}/#/recurringrun/details/s-1" in result.output
    sent = _sent(kfp_server, "recurringruns")
    assert sent.pop("pipeline_spec") == parse_pipeline(compile_once(fakes.config_of()))
    assert sent == {
        "display_name": "tiny",
        "experiment_id": "e-1",
        "max_concurrency": 2,
        "mode": "ENABLE",
        "no_catchup": False,
        "runtime_config": {"parameters": {"data_path": "d.csv"}, "pipeline_root": "s3://b/root"},
        "service_account": "runner",
        "trigger": {
            "cron_schedule": {
                "cron": "0 0 3 * * *",
                "start_time": "2026-12-24T03:00:00+00:00",
                "end_time": "2027-01-01T00:00:00+01:00",
            }
        },
    }
    assert kfp_server.bodies("POST", "/apis/v2beta1/runs") == []


def test_a_recurring_run_does_not_catch_up_unless_asked(kfp_server: FakeApi) -> None:
    assert _submit(kfp_server, "--cron", "@daily").exit_code == 0
    sent = _sent(kfp_server, "recurringruns")
    assert (sent["no_catchup"], sent["max_concurrency"]) == (True, 1)


def test_a_second_recurring_run_of_a_name_wants_to_be_asked_for(kfp_server: FakeApi) -> None:
    kfp_server.recurring = [
        api.V2beta1RecurringRun(recurring_run_id=f"s-{name}", display_name=name) for name in ("tiny", "other")
    ]
    result = _submit(kfp_server, "--cron", "0 0 3 * * *")
    assert result.exit_code == 1
    assert "There is a recurring run 'tiny' (s-tiny) already. Give --replace" in result.stderr
    assert kfp_server.bodies("POST", "/apis/v2beta1/recurringruns") == []

    assert _submit(kfp_server, "--cron", "0 0 3 * * *", "--replace").exit_code == 0
    changes = [(method, path) for method, path, *_ in kfp_server.received if method != "GET" and "recurring" in path]
    assert changes == [
        ("POST", "/apis/v2beta1/recurringruns"),
        ("DELETE", "/apis/v2beta1/recurringruns/s-tiny"),
    ]


def test_a_version_is_uploaded_and_run(kfp_server: FakeApi) -> None:
    result = _submit(kfp_server, "--pipeline-name", "taxi", "--version-name", "v7", "--namespace", "team-a")
    assert result.exit_code == 0, result.output
    assert _sent(kfp_server, "pipelines") == {"display_name": "taxi", "namespace": "team-a"}
    assert compile_once(fakes.config_of()).encode() in _sent(kfp_server, "pipelines/upload_version")
    assert kfp_server.queries("/apis/v2beta1/pipelines/upload_version") == [{"name": "v7", "pipelineid": "p-1"}]
    sent = _sent(kfp_server)
    assert sent["pipeline_version_reference"] == {"pipeline_id": "p-1", "pipeline_version_id": "v-1"}
    assert "pipeline_spec" not in sent


def test_a_version_may_be_uploaded_only(kfp_server: FakeApi) -> None:
    kfp_server.pipelines = [api.V2beta1Pipeline(pipeline_id="p-4", display_name="taxi")]
    result = _submit(kfp_server, "--pipeline-name", "taxi", "--version-name", "v7", "--no-run")
    assert result.output == f"Pipeline taxi, version v7: {kfp_server.url}/#/pipelines/details/p-4/version/v-1\n"
    assert {path for method, path, *_ in kfp_server.received if method == "POST"} == {
        "/apis/v2beta1/pipelines/upload_version"
    }


def test_a_pipeline_that_did_not_change_is_not_uploaded_again(kfp_server: FakeApi) -> None:
    assert _submit(kfp_server, "--pipeline-name", "taxi", "--no-run").exit_code == 0
    (query,) = kfp_server.queries("/apis/v2beta1/pipelines/upload_version")
    spec = parse_pipeline(compile_once(fakes.config_of()))
    version = api.V2beta1PipelineVersion("p-1", "v-9", display_name=query["name"], pipeline_spec=spec)
    kfp_server.versions = [version]
    kfp_server.received.clear()
    assert _submit(kfp_server, "--pipeline-name", "taxi").exit_code == 0
    assert kfp_server.bodies("POST", "/apis/v2beta1/pipelines/upload_version") == []
    assert _sent(kfp_server)["pipeline_version_reference"]["pipeline_version_id"] == "v-9"

    assert _submit(kfp_server, "train.epochs=3", "--pipeline-name", "taxi", "--no-run").exit_code == 0
    assert len(kfp_server.bodies("POST", "/apis/v2beta1/pipelines/upload_version")) == 1
    result = _submit(kfp_server, "train.epochs=3", "--pipeline-name", "taxi", "--version-name", query["name"])
    assert result.exit_code == 1
    assert f"has a version {query['name']} with another content" in result.stderr
    assert "  train.epochs: 10 -> 3  (" in result.stderr


def test_a_dry_run_says_what_would_be_sent(kfp_server: FakeApi) -> None:
    options = ["--dry-run", "--cron", "0 0 3 * * *", "--parameter", "data_path=d.csv", "--experiment", "spring"]
    result = _submit(kfp_server, *options)
    assert result.exit_code == 0, result.output
    said = yaml.safe_load(result.output)
    assert said.pop("pipeline").startswith(f"{len(compile_once(fakes.config_of()).encode())} bytes, SHA-256 ")
    assert said == {
        "host": kfp_server.url,
        "run_name": "tiny",
        "experiment": "spring",
        "parameters": {"data_path": "d.csv"},
        "schedule": {
            "cron": "0 0 3 * * *",
            "start_time": None,
            "end_time": None,
            "catch_up": False,
            "max_concurrency": 1,
        },
    }
    assert kfp_server.received == []


def test_a_dry_run_needs_no_host(kfp_server: FakeApi) -> None:
    result = CliRunner().invoke(main, ["tiny.yaml", "--dry-run"])
    assert result.exit_code == 0
    assert "host" not in yaml.safe_load(result.output)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--parameter", "data_pth=x"], "no run-time parameter 'data_pth'. Did you mean 'data_path'?"),
        (["--parameter", "data_path"], "expected name=value, received 'data_path'"),
        (["train.epoch=1"], "epochs"),
        (["--cron", "0 3 * * *"], "Kubeflow's first field is seconds: '0 0 3 * * *'"),
        (["--cron", "0 3 * *"], "expected six fields"),
        (["--cron", "0 0 3 * * *", "--start-time", "2026-12-24T03:00:00"], "has no time zone"),
        (["--cron", "0 0 3 * * *", "--end-time", "tomorrow"], "expected a time such as"),
        (["--cron", "0 0 3 * * *", "--max-concurrency", "11"], "11 is not in the range 1<=x<=10"),
        (["--cron", "0 0 3 * * *", "--wait"], "no end to --wait for"),
        (["--no-catch-up"], "Only a recurring run reads --catch-up: give --cron"),
        (["--replace"], "Only a recurring run reads --replace: give --cron"),
        (["--version-name", "v7"], "give --pipeline-name"),
        (["--no-run"], "give --pipeline-name"),
        (["--no-run", "--pipeline-name", "taxi", "--wait"], "--no-run starts nothing"),
        (["--no-run", "--pipeline-name", "taxi", "--run-name", "x"], "--no-run starts nothing"),
    ],
)
def test_wrong_usage_is_exit_code_2(kfp_server: FakeApi, options: list[str], text: str) -> None:
    result = _submit(kfp_server, *options)
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert not [path for method, path, *_ in kfp_server.received if method == "POST"]


def test_no_host_is_exit_code_2(kfp_server: FakeApi) -> None:
    result = CliRunner().invoke(main, ["tiny.yaml"])
    assert result.exit_code == 2
    assert "Missing option '--host'" in result.stderr
    assert not Path("pipeline.yaml").exists()
