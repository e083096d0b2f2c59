"""Kubernetes, KubeRay and mergesearch itself accept the manifests of the profiles."""

from __future__ import annotations

import base64
import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.api import preflight_process
from service.auth import settings
from service.auth.settings import GroupRole
from service.auth.tokens import given_token
from service.cli import main as command_line
from service.jobs.finetune.request import LOCAL_DATA
from service.types import Role
from tests.deploy import kuberay
from tests.deploy.chart import CHART, NAMESPACE, PROFILES, RELEASE, Helm, Manifests, values_of
from tests.deploy.conftest import Rendered
from tests.deploy.rules import environment, policies_of
from tests.end_to_end.server import ROOT

KUBERNETES = "1.37"

# Kinds that are not Kubernetes' own, by the API group of their definitions.
OTHERS = {"ray.io", "kueue.x-k8s.io", "monitoring.coreos.com"}

every_profile = pytest.mark.parametrize("profile", PROFILES)


needs_crds = pytest.mark.skipif(kuberay.reason_to_skip() is not None, reason=str(kuberay.reason_to_skip()))


def test_there_are_seven_profiles() -> None:
    assert PROFILES == (
        "air-gapped",
        "cpu-dev",
        "kueue",
        "locked-down",
        "multi-gpu",
        "single-gpu",
        "tensor-parallel",
    )


@every_profile
def test_lint_finds_nothing(profile: str, helm: Helm) -> None:
    done = helm.run("lint", "--strict", CHART, *values_of(profile))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "funcMap fail" not in done.stderr


def core(manifests: Manifests) -> list[dict[str, Any]]:
    return [each for each in manifests.objects if each["apiVersion"].partition("/")[0] not in OTHERS]


@every_profile
def test_core_kinds_are_those_of_kubernetes(profile: str, rendered: Rendered) -> None:
    """Every field is known to Kubernetes, those of the pods inside Ray's objects, too."""
    manifests = rendered[profile]
    for each in core(manifests):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    for number, pod in enumerate(manifests.pods):
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": pod.spec}
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    kinds = {each["apiVersion"].partition("/")[0] for each in manifests.objects}
    assert kinds & OTHERS, "only kinds that were named are left out"


def test_a_field_that_kubernetes_does_not_know_is_noticed(rendered: Rendered) -> None:
    (deployment,) = rendered["cpu-dev"].of("Deployment")
    wrong = copy.deepcopy(deployment)
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@needs_crds
@every_profile
def test_ray_kinds_are_those_of_kuberay(profile: str, rendered: Rendered) -> None:
    documents = [each for each in rendered[profile].objects if each["apiVersion"].startswith("ray.io/")]
    assert documents
    assert [problem for each in documents for problem in kuberay.problems(each)] == []


@needs_crds
@pytest.mark.parametrize(
    ("kind", "place", "value", "problem"),
    [
        ("RayCluster", "spec.headGroupSpecc", {}, "'headGroupSpecc' was unexpected"),
        ("RayCluster", "spec.authOptions.mode", "tokens", "'tokens' is not one of"),
        ("RayCluster", "spec.autoscalerOptions.idleTimeoutSeconds", "60", "'60' is not of type 'integer'"),
        ("RayCluster", "spec.upgradeStrategy.type", "Rolling", "'Rolling' is not one of"),
        ("RayCluster", "spec.workerGroupSpecs.0.maxReplica", 2, "'maxReplica' was unexpected"),
        ("RayCluster", "spec.workerGroupSpecs.0.template.spec.tolerance", [], "'tolerance' was unexpected"),
        ("RayCluster", "spec.managedBy", "me", "spec.managedBy: the managedBy field value must be either"),
        ("RayJob", "spec.preRunningDeadlineSeconds", 0, "less than the minimum"),
        (
            "RayJob",
            "spec.deletionStrategy",
            {"onSuccess": {"policy": "DeleteCluster"}},
            "deletionStrategy requires either BOTH onSuccess and onFailure",
        ),
        (
            "RayJob",
            "spec.deletionStrategy",
            {"deletionRules": [{"policy": "DeleteSelf", "condition": {"ttlSeconds": 1}}]},
            "the deletion condition requires either the JobStatus or the JobDeploymentStatus",
        ),
    ],
)
def test_what_kuberay_refuses_is_noticed(kind: str, place: str, value: Any, problem: str, rendered: Rendered) -> None:
    """Unknown fields, wrong types, and what only the definitions' CEL rules refuse."""
    (document,) = rendered["kueue" if kind == "RayJob" else "multi-gpu"].of(kind)
    document = copy.deepcopy(document)
    *path, last = place.split(".")
    part: Any = document
    for name in path:
        part = part[int(name)] if name.isdecimal() else part[name]
    part[last] = value
    found = kuberay.problems(document)
    assert any(problem in each for each in found), found


# What the pods run is what mergesearch has.


def containers(manifests: Manifests) -> list[Any]:
    return [container for pod in manifests.pods for container in pod.containers]


@every_profile
def test_commands_are_those_of_the_command_line(profile: str, rendered: Rendered) -> None:
    """The command line's own parser accepts what the pods run, and each study's entry point."""
    manifests = rendered[profile]
    commands = [
        [*each["command"][1:], *each["args"]]
        for each in containers(manifests)
        if each.get("command", [""])[0] == "mergesearch"
    ]
    commands += [shlex.split(job["spec"]["entrypoint"])[1:] for job in manifests.of("RayJob")]
    parser = command_line._parser()
    names = {parser.parse_args(each).call.__name__ for each in commands}
    assert names == ({"run"} if profile == "kueue" else {"serve", "migrate_database", "add_user"})


def test_accounts_are_there_or_given_up_explicitly(helm: Helm, rendered: Rendered) -> None:
    """By default the API starts after its administrator has the Secret's token; else it has no accounts."""
    for options, names, given in (
        ((), ["administrator", "monitoring"], False),
        (("--set", "accounts.enabled=false"), [], True),
        (("--set", "monitoring.enabled=false"), ["administrator"], False),
    ):
        manifests = helm.manifests("multi-gpu", *options)
        (deployment,) = manifests.of("Deployment")
        pod = deployment["spec"]["template"]["spec"]
        assert [each["name"] for each in pod.get("initContainers", ())] == names
        assert ("--no-accounts" in pod["containers"][0]["args"]) is given
        assert any(each["metadata"]["name"].endswith("-accounts") for each in manifests.of("Secret")) is not given
        for monitor in manifests.of("ServiceMonitor"):
            assert ("authorization" in monitor["spec"]["endpoints"][0]) is not given
    named = helm.manifests("multi-gpu", "--set", "accounts.existingSecret=ours")
    assert "ours" in json.dumps(named.of("Deployment"))
    for manifests in (rendered["multi-gpu"], rendered["cpu-dev"]):
        (secret,) = [each for each in manifests.of("Secret") if each["metadata"]["name"].endswith("-accounts")]
        for value in secret["data"].values():
            assert given_token(base64.b64decode(value).decode())


def test_nobody_logs_in_as_the_users_of_the_chart(helm: Helm) -> None:
    """The first person called monitoring at the provider is no administrator; one called admin only if asked for."""
    options = {"issuer": "https://login.example.org", "clientId": "m", "existingSecret": "ours"}
    provider = [text for name, value in options.items() for text in ("--set", f"api.oidc.{name}={value}")]
    for given, rule in (
        ((), "known"),
        (provider, "known"),
        ((*provider, "--set", "accounts.adminLogin=true"), "first"),
    ):
        (deployment,) = helm.manifests("multi-gpu", *given).of("Deployment")
        added = [
            command_line._parser().parse_args([*each["command"][1:], *each["args"]])
            for each in deployment["spec"]["template"]["spec"]["initContainers"]
        ]
        assert [(each.name, each.login) for each in added] == [("admin", rule), ("monitoring", "never")]


def test_browsers_log_in_by_the_values(helm: Helm) -> None:
    """The API gets the identity provider by options, the client secret from the Secret alone, and its own address."""
    options = {
        "issuer": "https://login.example.org/realms/main",
        "clientId": "mergesearch",
        "existingSecret": "ours",
        "scopes": "openid profile groups",
        "userClaim": "upn",
        "groupsClaim": "groups",
        "teams[0]": "search users=red:member",
        "createUsers": "true",
    }
    given = [text for name, value in options.items() for text in ("--set", f"api.oidc.{name}={value}")]
    for more, address in (
        (("--set", "ingress.host=search.example.org"), "https://search.example.org"),
        (("--set", "api.oidc.publicUrl=https://m.example.org/a"), "https://m.example.org/a"),
    ):
        manifests = helm.manifests("multi-gpu", *given, *more)
        (api,) = [each for each in containers(manifests) if each["name"] == "api"]
        parsed = command_line._parser().parse_args([*api["command"][1:], *api["args"]])
        assert (parsed.oidc_issuer, parsed.oidc_client_id) == (options["issuer"], options["clientId"])
        assert (parsed.oidc_scopes, parsed.oidc_user_claim) == (options["scopes"], options["userClaim"])
        assert (parsed.oidc_groups_claim, parsed.oidc_create_users) == ("groups", True)
        assert parsed.oidc_team == [GroupRole("search users", "red", Role.MEMBER)]
        assert parsed.public_url == address
        (secret,) = [each for each in api["env"] if each["name"] == settings.VARIABLE]
        assert secret["valueFrom"] == {"secretKeyRef": {"name": "ours", "key": "client_secret"}}
    assert settings.VARIABLE not in json.dumps(helm.manifests("multi-gpu").objects)


@pytest.mark.parametrize(
    ("given", "is_shared"),
    [((), False), (("--set", "data.workers=true"), True), (("--set", "artifacts.url="), True)],
    ids=["object store", "object store and volume", "volume"],
)
def test_fine_tunings_have_the_volume_or_are_refused(helm: Helm, given: tuple[str, ...], is_shared: bool) -> None:
    manifests = helm.manifests("multi-gpu", *given)
    pods = [pod for pod in manifests.pods if pod.is_ray]
    assert {pod.component for pod in pods} == {"ray-head", "ray-worker"}
    for pod in pods:
        (data,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "data"]
        assert ("persistentVolumeClaim" in data) is is_shared
        refuses = [LOCAL_DATA in environment(each) for each in pod.containers if each["name"].startswith("ray-")]
        assert refuses == [pod.component == "ray-head" and not is_shared]


def test_the_ingress_waits_for_checks_of_studies(helm: Helm) -> None:
    """ingress-nginx would answer 504 after a minute; annotations of the user are added."""
    manifests = helm.manifests("multi-gpu", "--set", "ingress.annotations.team=red")
    (ingress,) = manifests.of("Ingress")
    annotations = ingress["metadata"]["annotations"]
    assert float(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > 2 * preflight_process.Limits().time_s
    assert annotations["team"] == "red"


def test_mail_server_and_hosts_of_webhooks_are_given(helm: Helm) -> None:
    """The server gets the options of notifications, and the password from the named Secret; without them, none."""
    variable = "MERGESEARCH_SMTP_PASSWORD"
    options = {
        "webhookAllow[0]": "ci.internal",
        "waitingMinutes": "10",
        "smtpUrl": "smtp://bot@mail.example.org",
        "mailFrom": "search@example.org",
        "existingSecret": "ours",
    }
    given = [text for name, value in options.items() for text in ("--set", f"api.notifications.{name}={value}")]
    manifests = helm.manifests("multi-gpu", *given, "--set", "ingress.host=search.example.org")
    (api,) = [each for each in containers(manifests) if each["name"] == "api"]
    parsed = command_line._parser().parse_args([*api["command"][1:], *api["args"]])
    assert (parsed.webhook_allow, parsed.notify_waiting) == (["ci.internal"], 10)
    assert (parsed.smtp_url, parsed.mail_from) == (options["smtpUrl"], options["mailFrom"])
    assert parsed.public_url == "https://search.example.org"
    (secret,) = [each for each in api["env"] if each["name"] == variable]
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "ours", "key": "smtp_password"}}
    assert variable not in json.dumps(helm.manifests("multi-gpu").objects)


def test_an_option_that_is_not_there_is_noticed(capsys: pytest.CaptureFixture[str], helm: Helm) -> None:
    manifests = helm.manifests("cpu-dev", "--set", "api.extraArgs[0]=--alow-host=x")
    (api,) = [each for each in containers(manifests) if each["name"] == "api"]
    with pytest.raises(SystemExit):
        command_line._parser().parse_args([*api["command"][1:], *api["args"]])
    assert "--alow-host" in capsys.readouterr().err


def test_variables_are_those_that_mergesearch_reads(rendered: Rendered) -> None:
    names = {
        each["name"]
        for profile in PROFILES
        for container in containers(rendered[profile])
        for each in container.get("env", ())
        if each["name"].startswith("MERGESEARCH_")
    }
    sources = "".join(file.read_text() for room in ("service", "workers") for file in (ROOT / room).rglob("*.py"))
    assert names == {LOCAL_DATA, "MERGESEARCH_DATABASE", "MERGESEARCH_CACHE", "MERGESEARCH_ENGINE_NODES"}
    assert [name for name in names if f'"{name}"' not in sources] == []


def test_the_health_routes_are_those_of_the_server(rendered: Rendered) -> None:
    (api,) = [each for each in containers(rendered["multi-gpu"]) if each["name"] == "api"]
    paths = {api[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    routes = (ROOT / "service" / "api" / "routes" / "operations.py").read_text()
    assert paths == {"/healthz"}
    (test,) = [each for each in containers(rendered["multi-gpu"]) if each["name"] == "test"]
    for path in (*paths, "/readyz"):
        assert f'@router.get("{path}"' in routes
    assert "-api/readyz" in test["args"][0]


def test_the_data_directory_is_among_those_that_studies_may_name(rendered: Rendered, tmp_path: Path) -> None:
    """`--allow-dir` replaces the default directories, so it names each of these that pods have."""
    defaults = preflight_process.default_access(tmp_path).readable
    assert str(tmp_path) in defaults
    for profile in PROFILES:
        for api in (each for each in containers(rendered[profile]) if each["name"] == "api"):
            mounts = {each["name"]: each["mountPath"] for each in api["volumeMounts"]}
            allowed = {each.partition("=")[2] for each in api["args"] if each.startswith("--allow-dir=")}
            assert allowed == {
                "/opt/example",
                *(mounts[name] for name in ("data", "cache", "models") if name in mounts),
            }


# Changes between releases.


@every_profile
def test_the_same_values_give_the_same_objects(profile: str, helm: Helm, rendered: Rendered) -> None:
    """Only generated secrets differ, and those are looked up and kept in a cluster."""

    def without_secrets(manifests: Manifests) -> list[dict[str, Any]]:
        return [each for each in manifests.objects if each["kind"] != "Secret"]

    assert without_secrets(helm.manifests(profile)) == without_secrets(rendered[profile])


def test_another_chart_version_leaves_rays_pods_alone(helm: Helm, rendered: Rendered, tmp_path: Path) -> None:
    """A new chart with the same image must not end running studies: the RayCluster's spec stays the same."""
    chart = tmp_path / "mergesearch"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    file.write_text(re.sub(r"^version: .*$", "version: 9.9.9", file.read_text(), flags=re.MULTILINE))
    (new,), (old,) = helm.manifests("multi-gpu", chart=chart).of("RayCluster"), rendered["multi-gpu"].of("RayCluster")
    assert new["metadata"] != old["metadata"]
    assert new["spec"] == old["spec"]


def test_another_token_replaces_all_pods_that_have_it(helm: Helm, rendered: Rendered) -> None:
    """Ray's pods and the API name the new Secret, so both are replaced; the old Secret is kept."""
    new = helm.manifests("multi-gpu", "--set", "ray.token.revision=2")
    for manifests, name in (
        (rendered["multi-gpu"], "demo-mergesearch-ray-token-1"),
        (new, "demo-mergesearch-ray-token-2"),
    ):
        (cluster,), (deployment,) = manifests.of("RayCluster"), manifests.of("Deployment")
        assert cluster["spec"]["authOptions"]["secretName"] == name
        assert f'"{name}"' in json.dumps(deployment)
        secrets = {each["metadata"]["name"] for each in manifests.of("Secret")}
        assert secrets == {name, "demo-mergesearch-accounts"}


def test_a_group_has_settings_of_its_own(helm: Helm, tmp_path: Path) -> None:
    """Everything that a GPU group may have ends in its pods or in the group."""
    group = {
        "name": "mi300",
        "gpus": 8,
        "gpuResource": "amd.com/gpu",
        "cpu": "90",
        "memory": "900Gi",
        "shm": "300Gi",
        "minReplicas": 0,
        "maxReplicas": 2,
        "idleTimeoutSeconds": 7200,
        "nodeSelector": {"gpu": "mi300"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "runtimeClassName": "amd",
        "priorityClassName": "studies",
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "podAnnotations": {"a": "b"},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"ray": {"gpuGroups": [group]}}))
    (cluster,) = helm.manifests("multi-gpu", "--values", tmp_path / "values.yaml").of("RayCluster")
    _, found = cluster["spec"]["workerGroupSpecs"]
    template, (container,) = found["template"], found["template"]["spec"]["containers"]
    assert (found["groupName"], found["maxReplicas"], found["idleTimeoutSeconds"]) == ("mi300", 2, 7200)
    assert container["resources"]["limits"] == {"cpu": "90", "memory": "900Gi", "amd.com/gpu": 8}
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    assert template["metadata"]["annotations"] == {"a": "b"}
    for key in ("nodeSelector", "tolerations", "runtimeClassName", "priorityClassName"):
        assert template["spec"][key] == group[key]


def test_one_registry_serves_all_images(helm: Helm) -> None:
    manifests = helm.manifests("cpu-dev", "--set", "registry=registry.example:5000/team/,image.repository=mergesearch")
    images = {each["image"] for pod in manifests.pods for each in pod.spec["containers"]}
    assert images == {
        "registry.example:5000/team/mergesearch:0.1.0-ray2.60.0-cpu",
        "registry.example:5000/team/postgres:17.6",
    }


@pytest.mark.parametrize(
    ("option", "source"),
    [
        ("size=50Gi", {"emptyDir": {"sizeLimit": "50Gi"}}),
        ("hostPath=/mnt/models", {"hostPath": {"path": "/mnt/models", "type": "Directory"}}),
        (
            "storageClass=fast",
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "fast",
                            "resources": {"requests": {"storage": "200Gi"}},
                        }
                    }
                }
            },
        ),
    ],
)
def test_the_cache_of_models_has_three_places(option: str, source: dict[str, Any], helm: Helm) -> None:
    manifests = helm.manifests("multi-gpu", "--set", f"models.cache.{option}")
    found = [volume for pod in manifests.pods for volume in pod.spec.get("volumes", ()) if volume["name"] == "cache"]
    assert found == [{"name": "cache", **source}] * 5  # the API, the head and three groups
    for pod in manifests.pods:
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod.spec}
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_air_gapped_pods_may_not_leave_the_cluster(rendered: Rendered) -> None:
    manifests = rendered["air-gapped"]
    assert not [each for each in manifests.of("NetworkPolicy") if each["metadata"]["name"].endswith("-internet")]
    offline = [each["name"] for each in containers(manifests) if "HF_HUB_OFFLINE" in json.dumps(each)]
    assert offline == ["api", "ray-head", "ray-worker", "ray-worker"]


def test_notes_list_the_images_and_what_comes_next(helm: Helm) -> None:
    """`helm install` prints the images, how to reach the service, and the command that says what is missing."""
    done = helm.run("install", "demo", CHART, "--dry-run=client", "--namespace", "searches", *values_of("cpu-dev"))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for line in (
        "helm test demo --namespace searches --logs",
        "port-forward service/demo-mergesearch-api 8080:80",
        "  localhost/mergesearch:0.1.0-ray2.60.0-cpu",
        "  docker.io/library/postgres:17.6",
    ):
        assert line in notes


def test_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    constraints = (ROOT / "deploy" / "constraints.txt").read_text()
    assert f'version = "{chart["appVersion"]}"' in project
    assert f"ray=={values['ray']['version']}\n" in constraints


def test_a_queued_study_is_interrupted_before_its_pod_ends(rendered: Rendered, tmp_path: Path) -> None:
    """The head's hook ends the study as Ctrl-C does, not the shell that runs it, and waits for its end."""
    (head,) = [each for each in containers(rendered["kueue"]) if each["name"] == "ray-head"]
    command = head["lifecycle"]["preStop"]["exec"]["command"]
    program = tmp_path / "mergesearch"
    program.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background of a shell ignore it
        "try:\n"
        f"    pathlib.Path({str(tmp_path / 'started')!r}).touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.5)\n"
        f"    pathlib.Path({str(tmp_path / 'stored')!r}).touch()\n"
    )
    line = f"{sys.executable} {program} run /study/study.yaml --out x; echo $? > {tmp_path / 'code'}"
    with subprocess.Popen(["sh", "-c", line]) as shell:
        while not (tmp_path / "started").exists():
            time.sleep(0.02)
        subprocess.run([sys.executable, *command[1:]], check=True, timeout=60)
        assert (tmp_path / "stored").exists()
        assert shell.wait(30) == 0
    assert (tmp_path / "code").read_text() == "0\n"


def test_alerts_and_dashboards_are_those_of_their_files(helm: Helm, tmp_path: Path) -> None:
    """Files in `monitoring` become objects: the braces of Prometheus are none of Helm's."""
    chart = tmp_path / "mergesearch"
    shutil.copytree(CHART, chart)
    shutil.rmtree(chart / "monitoring", ignore_errors=True)
    (chart / "monitoring" / "dashboards").mkdir(parents=True)
    alert = {"alert": "Stuck", "expr": "up == 0", "annotations": {"summary": "{{ $labels.job }} is stuck"}}
    groups = {"groups": [{"name": "mergesearch", "rules": [alert]}]}
    (chart / "monitoring" / "alerts.yaml").write_text("# Rules\n" + yaml.safe_dump(groups))
    dashboard = {"title": "Studies", "legend": "{{study}}"}
    (chart / "monitoring" / "dashboards" / "studies.json").write_text(json.dumps(dashboard, indent=2))
    manifests = helm.manifests("locked-down", chart=chart)
    (rules,) = manifests.of("PrometheusRule")
    (config,) = manifests.of("ConfigMap")
    labels = {"namespace": NAMESPACE, "app_kubernetes_io_instance": RELEASE}
    assert rules["spec"] == {"groups": [{"name": "mergesearch", "rules": [{**alert, "labels": labels}]}]}
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert config["metadata"]["name"] == "demo-mergesearch-studies"
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["studies.json"]) == dashboard
    without = helm.manifests("single-gpu", chart=chart)
    assert not without.of("PrometheusRule") + without.of("ConfigMap")


def test_logs_and_traces_reach_every_process(helm: Helm, rendered: Rendered) -> None:
    """The API and Ray's pods get the format of logs and the collector, and may connect to it; by default neither."""
    names = {"MERGESEARCH_LOG_FORMAT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"}
    values = ("logs.format=json", "tracing.endpoint=http://collector.observability:4318")
    options = [word for value in values for word in ("--set", value)]
    manifests = helm.manifests("multi-gpu", *options, "--set-json", "tracing.ratio=0.1")
    pods = [pod for pod in manifests.pods if pod.component in ("api", "ray-head", "ray-worker")]
    assert len(pods) > 2
    for pod in pods:
        known = environment(pod.containers[0])
        assert {name: known[name]["value"] for name in names} == {
            "MERGESEARCH_LOG_FORMAT": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability:4318",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.1",
        }
        ports = [
            rule.get("ports") for policy in policies_of(manifests, pod) for rule in policy["spec"].get("egress", ())
        ]
        assert [{"protocol": "TCP", "port": 4318}] in ports
    before = rendered["multi-gpu"]
    assert not any(names & set(environment(container)) for pod in before.pods for container in pod.containers)
    assert "demo-mergesearch-tracing" not in [each["metadata"]["name"] for each in before.of("NetworkPolicy")]


# What the chart has no value for can be changed by kustomize.


def test_kustomize_changes_what_has_no_value(programs: Path, rendered: Rendered, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(rendered["multi-gpu"].text)
    (tmp_path / "kustomization.yaml").write_text(
        """
        resources: [all.yaml]
        patches:
          - target: {kind: Deployment, name: demo-mergesearch-api}
            patch: |-
              - {op: add, path: /spec/template/spec/hostAliases, value: [{ip: 10.0.0.1, hostnames: [hub]}]}
        """
    )
    done = subprocess.run([programs / "kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (deployment,) = Manifests(done.stdout).of("Deployment")
    assert deployment["spec"]["template"]["spec"]["hostAliases"] == [{"ip": "10.0.0.1", "hostnames": ["hub"]}]
    assert len(Manifests(done.stdout).objects) == len(rendered["multi-gpu"].objects)
