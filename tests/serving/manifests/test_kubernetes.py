"""The Kubernetes objects: valid, consistent with each other, and what they say."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.manifests import kubernetes
from serving.manifests.config import ServingManifestConfig, with_versions
from serving.manifests.documents import HEADER, without_comments
from serving.manifests.render import render
from tests.serving.manifests import checks
from tests.serving.manifests.configs import SETTINGS, make_config


def objects_of(config: ServingManifestConfig) -> list[dict[str, Any]]:
    return [without_comments(each) for each in kubernetes.objects(config)]


def find(objects: list[dict[str, Any]], kind: str, name: str = "chicago-taxi") -> dict[str, Any]:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(objects: list[dict[str, Any]], name: str = "chicago-taxi") -> dict[str, Any]:
    return find(objects, "Deployment", name)["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", SETTINGS)
def test_objects_are_valid(name: str) -> None:
    objects = objects_of(make_config(name))
    assert checks.problems(objects) == []
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)


def _misspell(objects: list[dict[str, Any]]) -> None:
    pod_of(objects)["containers"][0]["livenesProbe"] = {}


def _mistype(objects: list[dict[str, Any]]) -> None:
    find(objects, "Service")["spec"]["ports"][0]["port"] = "8500"


def _lose_config(objects: list[dict[str, Any]]) -> None:
    objects.remove(find(objects, "ConfigMap", "chicago-taxi-models-3"))


def _select_nothing(objects: list[dict[str, Any]]) -> None:
    find(objects, "Service", "chicago-taxi-canary")["spec"]["selector"]["track"] = "beta"


def _share_pods(objects: list[dict[str, Any]]) -> None:
    for name in ("chicago-taxi", "chicago-taxi-canary"):
        del find(objects, "Deployment", name)["spec"]["selector"]["matchLabels"]["track"]


def _lose_mount(objects: list[dict[str, Any]]) -> None:
    pod_of(objects)["containers"][0]["volumeMounts"].pop(0)


def _route_to_nothing(objects: list[dict[str, Any]]) -> None:
    find(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["name"] = "x"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (_misspell, "'livenesProbe' was unexpected"),
        (_mistype, "'8500' is not of type 'integer'"),
        (_lose_config, "Deployment chicago-taxi: there is no ConfigMap chicago-taxi-models-3"),
        (_select_nothing, "Service chicago-taxi-canary: {"),
        (_share_pods, "selects the pods of another Deployment"),
        (_lose_mount, "nothing mounts the volume models"),
        (_route_to_nothing, "HTTPRoute chicago-taxi: there is no Service x"),
    ],
)
def test_the_check_refuses_what_is_broken(break_it: Callable[[list[dict[str, Any]]], None], message: str) -> None:
    objects = copy.deepcopy(objects_of(make_config("gateway")))
    break_it(objects)
    assert message in "\n".join(checks.problems(objects))


def _kustomize() -> list[str] | None:
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


@pytest.mark.skipif(_kustomize() is None, reason="needs kustomize or kubectl")
@pytest.mark.parametrize("overlay", ["dev", "production"])
@pytest.mark.parametrize("name", ["pinned", "replicas", "gateway", "s3"])
def test_overlays_build(name: str, overlay: str, tmp_path: Path) -> None:
    command = _kustomize()
    assert command is not None
    config = make_config(name)
    for path, text in render(config, "kubernetes").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    done = subprocess.run([*command, str(tmp_path / "overlays" / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert checks.problems(built) == []
    assert {each["metadata"]["namespace"] for each in built} == {"serving-dev" if overlay == "dev" else "serving"}
    kinds = {each["kind"] for each in built}
    deployments = [each["spec"] for each in built if each["kind"] == "Deployment"]
    if overlay == "dev":
        assert kinds.isdisjoint({"HorizontalPodAutoscaler", "PodDisruptionBudget"})
        for spec in deployments:
            (container,) = spec["template"]["spec"]["containers"]
            assert spec["replicas"] == 1
            assert container["resources"]["requests"] == {"cpu": "100m", "memory": "2Gi"}
            assert container["args"], "the rest of the container stays"
    else:
        assert kinds == {each["kind"] for each in kubernetes.objects(config)}
        for spec in deployments:
            spread = spec["template"]["spec"]["topologySpreadConstraints"]
            assert [each["whenUnsatisfiable"] for each in spread] == ["ScheduleAnyway", "DoNotSchedule"]


@pytest.mark.parametrize("name", SETTINGS)
def test_files_are_the_objects_with_comments(name: str) -> None:
    config = make_config(name)
    files = render(config, "kubernetes")
    assert files == render(config, "kubernetes")
    for path, text in files.items():
        assert text.startswith(HEADER), path
        assert "# " not in "".join(line for line in text.splitlines() if line.endswith(": null")), path
    in_files = [
        each
        for path, text in files.items()
        if path.startswith("base/") and not path.endswith("kustomization.yaml")
        for each in yaml.safe_load_all(text)
    ]
    assert sorted(in_files, key=json.dumps) == sorted(objects_of(config), key=json.dumps)
    listed = yaml.safe_load(files["base/kustomization.yaml"])["resources"]
    assert {f"base/{each}" for each in listed} == {
        path for path in files if path.startswith("base/") and not path.endswith("kustomization.yaml")
    }
    assert "# No CPU limit: throttling would show in the slowest answers.\n" in files["base/deployment.yaml"]


def test_probes_of_tf_serving() -> None:
    """Its status page answers 200 while a model loads; metadata of the stable label needs the loaded version."""
    (container,) = pod_of(objects_of(make_config("labels")))["containers"]
    ready = "/v1/models/chicago_taxi/labels/stable/metadata"
    assert container["startupProbe"]["httpGet"] == {"path": ready, "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": ready, "port": "http"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/v1/models/chicago_taxi"
    (container,) = pod_of(objects_of(make_config("replicas")), "chicago-taxi-canary")["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/models/chicago_taxi/labels/canary/metadata"
    (container,) = pod_of(objects_of(make_config("plain", load_timeout_seconds=62)))["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v1/models/chicago_taxi/metadata"
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 65


def test_draining() -> None:
    """TF Serving has to finish its requests in the preStop hook; the embedded server does it after SIGTERM."""
    pod = pod_of(objects_of(make_config(request_timeout_seconds=20)))
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 30}}}
    assert pod["terminationGracePeriodSeconds"] == 35
    pod = pod_of(objects_of(make_config("embedded", request_timeout_seconds=20)))
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 10}}}
    assert "--drain_grace_seconds=20" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] == 35
    assert pod["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/healthz/live"


@pytest.mark.parametrize("name", SETTINGS)
def test_pods_may_do_little(name: str) -> None:
    pod = pod_of(objects_of(make_config(name)))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod.get("initContainers", []), *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


def test_storage() -> None:
    pod = pod_of(objects_of(make_config()))
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert pod["containers"][0]["volumeMounts"][0] == {
        "name": "models",
        "mountPath": "/models/chicago_taxi",
        "subPath": "serving_models/chicago_taxi",
        "readOnly": True,
    }
    pod = pod_of(objects_of(make_config("kind")))
    assert pod["volumes"][0]["hostPath"]["path"] == "/mnt/models/chicago_taxi"
    objects = objects_of(make_config("s3"))
    (copier,) = pod_of(objects)["initContainers"]
    environment = {each["name"]: each["value"] for each in copier["env"]}
    assert environment["SOURCE"] == ":s3:bucket/models/chicago_taxi"
    assert environment["RCLONE_S3_PROVIDER"] == "Minio"
    assert copier["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert find(objects, "NetworkPolicy")["spec"]["egress"] == [{}]
    account = find(objects_of(make_config("gs")), "ServiceAccount")
    assert list(account["metadata"]["annotations"]) == ["iam.gke.io/gcp-service-account"]
    assert find(objects_of(make_config()), "NetworkPolicy")["spec"]["egress"] == []


def test_resources() -> None:
    (container,) = pod_of(objects_of(make_config("gpu")))["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "3500m", "memory": "8Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "1"},
    }
    assert "--tensorflow_intra_op_parallelism=4" in container["args"]


def test_replicas_of_a_canary() -> None:
    objects = objects_of(make_config("replicas"))
    limits = {
        each["metadata"]["name"]: (each["spec"]["minReplicas"], each["spec"]["maxReplicas"])
        for each in objects
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    assert limits == {"chicago-taxi": (3, 9), "chicago-taxi-canary": (1, 3)}
    assert "replicas" not in find(objects, "Deployment")["spec"], "the autoscaler's number would be reset at each apply"
    selector = find(objects, "Service")["spec"]["selector"]
    for name in ("chicago-taxi", "chicago-taxi-canary"):
        labels = find(objects, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
    assert find(objects_of(make_config("pinned")), "Deployment")["spec"]["replicas"] == 1


def test_weights_of_a_gateway() -> None:
    objects = objects_of(make_config("gateway"))
    for kind, port, hostname in (
        ("HTTPRoute", 8501, "taxi.example.com"),
        ("GRPCRoute", 8500, "grpc.taxi.example.com"),
    ):
        spec = find(objects, kind)["spec"]
        assert spec["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
        assert spec["hostnames"] == [hostname]
        (rule,) = spec["rules"]
        assert rule["backendRefs"] == [
            {"name": "chicago-taxi-stable", "port": port, "weight": 95},
            {"name": "chicago-taxi-canary", "port": port, "weight": 5},
        ]
    objects = objects_of(make_config(gateway={"name": "public"}))
    assert not any(each["kind"] == "GRPCRoute" for each in objects), "no host name keeps it apart from REST"
    (rule,) = find(objects, "HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "chicago-taxi-stable", "port": 8501, "weight": 100}]


def test_who_may_ask() -> None:
    (rule,) = find(objects_of(make_config("replicas")), "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "istio-system"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]


def test_what_restarts_pods_in_a_rollout() -> None:
    """A canary by labels comes and goes within running pods; another stable version or server config restarts them."""
    stable = make_config("pinned")
    canary = with_versions(stable, stable_version=3, canary_version=4, canary_percent=10)
    promoted = with_versions(canary, stable_version=4)
    before, during, after = (objects_of(config) for config in (stable, canary, promoted))
    assert find(before, "Deployment") == find(during, "Deployment") != find(after, "Deployment")
    assert find(before, "ConfigMap", "chicago-taxi-models-3") != find(during, "ConfigMap", "chicago-taxi-models-3")
    batched = objects_of(make_config("pinned", batching={}))
    assert find(batched, "Deployment") != find(before, "Deployment")


RCLONE = """#!/bin/sh
# lsf or copy, from a folder in the place of a store
case $1 in
  lsf) for last; do :; done; cd "$last" && ls -d */saved_model.pb 2>/dev/null; true ;;
  copy) [ -e "$2/fails" ] && mkdir -p "$3" && cp "$2/saved_model.pb" "$3" && exit 1; mkdir -p "$3" && cp -r "$2/." "$3" ;;
esac
"""


def test_models_are_copied_whole(tmp_path: Path) -> None:
    """The sidecar's script, each round of its loop ended by a `sleep` that fails."""
    (copier,) = pod_of(objects_of(make_config("s3")))["initContainers"]
    script = copier["command"][2].replace("/models/.copied", str(tmp_path / "copied"))
    store, target, tools = tmp_path / "store", tmp_path / "models" / "taxi", tmp_path / "bin"
    for tool, text in (("rclone", RCLONE), ("sleep", "#!/bin/sh\nkill $PPID\n")):
        tools.mkdir(exist_ok=True)
        (tools / tool).write_text(text)
        (tools / tool).chmod(0o755)

    def one_round() -> list[str]:
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SOURCE": str(store), "TARGET": str(target)}
        environment["POLL_SECONDS"] = "1"
        subprocess.run(["sh", "-c", script], env=environment, capture_output=True, timeout=20, check=False)
        return sorted(path.name for path in target.iterdir() if path.name.isdigit())

    store.mkdir()
    assert one_round() == []
    assert not (tmp_path / "copied").exists(), "the server must wait"
    for version in ("1", "2", "10"):
        (store / version / "variables").mkdir(parents=True)
        (store / version / "variables" / "v").write_text(version)
    (store / "1" / "saved_model.pb").write_text("one")
    (store / "10" / "saved_model.pb").write_text("ten")
    (store / "10" / "fails").touch()
    (store / "notes").mkdir()
    (store / "notes" / "saved_model.pb").write_text("no version")
    assert one_round() == ["1"], "2 is still being written, 10 breaks off"
    assert (tmp_path / "copied").exists()
    assert (target / "1" / "variables" / "v").read_text() == "1"
    (store / "10" / "fails").unlink()
    (store / "2" / "saved_model.pb").write_text("two")
    shutil.rmtree(store / "1")
    assert one_round() == ["10", "2"]
    shutil.rmtree(store)
    assert one_round() == ["10", "2"], "a store that does not answer takes nothing away"
