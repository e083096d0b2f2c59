"""Rules for the manifests of every profile. A rule yields each problem with its place, and nothing if all is well."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from service.engine_machines import VARIABLE, EngineMachines, parse_machines
from service.jobs.serving.endpoint import PORTS
from tests.deploy.chart import CHART, NAMESPACE, RELEASE, Manifests, Pod

__all__ = ["RULES", "Rule"]

Rule = Callable[[Manifests], Iterator[str]]

RULES: dict[str, Rule] = {}

PRODUCT = ("api", "ray-head", "ray-worker")
WITH_DATABASE = ("api", "ray-head", "migrate")
GPU_RESOURCE = "nvidia.com/gpu"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
SPOT_KEYS = {
    "karpenter.sh/capacity-type",
    "eks.amazonaws.com/capacityType",
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
}
SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|DATABASE$")


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def environment(container: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {each["name"]: each for each in container.get("env", ())}


def is_product(pod: Pod) -> bool:
    return pod.component in PRODUCT


def gib(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w+)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 2**-10, "Gi": 1, "Ti": 2**10}[unit]


# Ray


@rule
def ray_asks_for_a_token(manifests: Manifests) -> Iterator[str]:
    secrets = set()
    for spec in manifests.clusters:
        options = spec.get("authOptions", {})
        if options.get("mode") != "token" or not options.get("secretName"):
            yield f"RayCluster: authOptions are {options}"
        secrets.add(options.get("secretName"))
    for pod in manifests.pods:
        if pod.component == "api":
            known = environment(pod.containers[0])
            if known.get("RAY_AUTH_MODE", {}).get("value") != "token":
                yield f"{pod.where}: RAY_AUTH_MODE is not token"
            reference = known.get("RAY_AUTH_TOKEN", {}).get("valueFrom", {}).get("secretKeyRef", {})
            if reference.get("name") not in secrets or reference.get("key") != "auth_token":
                yield f"{pod.where}: RAY_AUTH_TOKEN comes from {reference}, the cluster's from {secrets}"


@rule
def no_service_leads_to_ray(manifests: Manifests) -> Iterator[str]:
    for spec in manifests.clusters:
        if spec["headGroupSpec"].get("serviceType") != "ClusterIP":
            yield f"RayCluster: the head's Service is {spec['headGroupSpec'].get('serviceType')}"
    for service in manifests.of("Service"):
        if service["spec"].get("type", "ClusterIP") != "ClusterIP":
            yield f"Service {service['metadata']['name']}: type {service['spec']['type']}"
        for pod in manifests.pods:
            if pod.is_ray and service["spec"]["selector"].items() <= pod.labels.items():
                yield f"Service {service['metadata']['name']}: leads to {pod.where}"
    for ingress in manifests.of("Ingress"):
        backends = re.findall(r'"service": {"name": "([^"]+)"', json.dumps(ingress))
        if "defaultBackend" in ingress["spec"] or set(backends) != {f"{RELEASE}-mergesearch-api"}:
            yield f"Ingress: leads to {backends}"


@rule
def the_head_runs_no_trials_and_is_never_on_spot(manifests: Manifests) -> Iterator[str]:
    for spec in manifests.clusters:
        head = spec["headGroupSpec"]
        if head["rayStartParams"].get("num-cpus") != "0":
            yield "head: num-cpus is not 0"
        pod = head["template"]["spec"]
        memory = pod["containers"][0]["resources"]["limits"]["memory"]
        if gib(memory) < 8:
            yield f"head: memory {memory}"
        required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (term,) = required["nodeSelectorTerms"]
        if {each["key"] for each in term["matchExpressions"] if each["operator"] == "NotIn"} != SPOT_KEYS:
            yield "head: may run on a spot node"


@rule
def no_node_is_emptied_below_the_head(manifests: Manifests) -> Iterator[str]:
    """The head's disruption budget has an integer `minAvailable`, the only kind that works for KubeRay's pods."""
    for cluster in manifests.of("RayCluster"):
        labels = cluster["spec"]["headGroupSpec"]["template"]["metadata"]["labels"]
        budgets = [
            each["spec"] for each in manifests.of("PodDisruptionBudget") if selects(each["spec"]["selector"], labels)
        ]
        if [(each.get("minAvailable"), "maxUnavailable" in each) for each in budgets] != [(1, False)]:
            yield f"head: disruption budget {budgets}"


@rule
def the_autoscaler_may_scale(manifests: Manifests) -> Iterator[str]:
    for cluster in manifests.of("RayCluster"):
        spec = cluster["spec"]
        options = spec.get("autoscalerOptions", {})
        if not spec.get("enableInTreeAutoscaling") or options.get("version") != "v2":
            yield "RayCluster: no autoscaler v2"
        if options.get("idleTimeoutSeconds", 0) < 600:
            yield f"RayCluster: idle nodes go after {options.get('idleTimeoutSeconds')} s, before an engine has started"
        if spec.get("upgradeStrategy", {}).get("type") != "Recreate":
            yield "RayCluster: an upgrade leaves old pods"
        for group in spec["workerGroupSpecs"]:
            if "replicas" in group:
                yield f"group {group['groupName']}: an upgrade would undo what the autoscaler set"
            if not 0 <= group["minReplicas"] <= group["maxReplicas"]:
                yield f"group {group['groupName']}: from {group['minReplicas']} to {group['maxReplicas']} pods"


@rule
def gpu_groups_get_their_gpus(manifests: Manifests) -> Iterator[str]:
    for spec in manifests.clusters:
        names = [group["groupName"] for group in spec["workerGroupSpecs"]]
        if len(set(names)) != len(names):
            yield f"two groups of one name: {names}"
        for group in spec["workerGroupSpecs"]:
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            wanted = container["resources"]
            if wanted["requests"] != wanted["limits"]:
                yield f"group {group['groupName']}: requests differ from limits, so it is evicted first"
            if GPU_RESOURCE in wanted["limits"] and not any(
                each["key"] == GPU_RESOURCE and each["operator"] == "Exists" for each in pod.get("tolerations", ())
            ):
                yield f"group {group['groupName']}: does not tolerate the taint of GPU nodes"
            if (GPU_RESOURCE in wanted["limits"]) == (group["groupName"] == "cpu"):
                yield f"group {group['groupName']}: GPUs {wanted['limits'].get(GPU_RESOURCE)}"


@rule
def checks_know_the_nodes_of_engines(manifests: Manifests) -> Iterator[str]:
    """The API and the head have no GPU; a variable lists the machines of engines, so that they can check studies."""
    groups = [group for spec in manifests.clusters for group in spec["workerGroupSpecs"] if group["maxReplicas"]]
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
    expected = tuple(
        EngineMachines(each.get(GPU_RESOURCE, 0), int(gib(each["memory"]) * 2**30), most=group["maxReplicas"])
        for each, group in zip(limits, groups, strict=True)
    )
    for pod in manifests.pods:
        if pod.component in ("api", "ray-head"):
            text = environment(pod.containers[0]).get(VARIABLE, {}).get("value", "")
            if (stated := parse_machines(text)) != expected:
                yield f"{pod.where}: {stated} are stated, {expected} are there"


@rule
def shared_memory_fits(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        if not pod.is_ray:
            continue
        container = pod.containers[0]
        name = next((each["name"] for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"), None)
        volume: dict[str, Any] = next((each for each in pod.spec["volumes"] if each["name"] == name), {})
        source = volume.get("emptyDir", {})
        if source.get("medium") != "Memory" or "sizeLimit" not in source:
            yield f"{pod.where}: /dev/shm is {volume}"
        elif gib(source["sizeLimit"]) > gib(container["resources"]["limits"]["memory"]) / 2:
            yield f"{pod.where}: /dev/shm may take more than half of the memory"


@rule
def ray_pods_do_not_change_with_the_chart(manifests: Manifests) -> Iterator[str]:
    """Labels and annotations of Ray's pods name no version, so that a new version of the chart alone ends no pods."""
    for pod in manifests.pods:
        if pod.is_ray and any("version" in key or "chart" in key for key in pod.labels):
            yield f"{pod.where}: labels {dict(pod.labels)}"


@rule
def stored_paths_are_the_same_everywhere(manifests: Manifests) -> Iterator[str]:
    """Every pod has the same paths: stored jobs contain paths that servers, drivers and engines must all find."""
    places: dict[str, set[str]] = {}
    for pod in manifests.pods:
        if is_product(pod):
            mounts = {each["name"]: each["mountPath"] for each in pod.containers[0]["volumeMounts"]}
            for name in ("tmp", "home", "cache", "data", "models"):
                places.setdefault(name, set()).add(mounts.get(name, "nowhere"))
    for name, found in places.items():
        if len(found) > 1:
            yield f"{name}: at {sorted(found)}"


@rule
def ray_gets_the_variables_it_reads_at_its_start(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        if pod.is_ray:
            known = environment(pod.containers[0])
            missing = {
                "RAY_TRAIN_ENABLE_STATE_TRACKING",
                "RAY_raylet_start_wait_time_s",
                "RAY_agent_register_timeout_ms",
                "RAY_prestart_worker_first_driver",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
                "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
                "RAY_JOB_STOP_WAIT_TIME_S",
            } - set(known)
            if missing:
                yield f"{pod.where}: lacks {sorted(missing)}"


# Images


@rule
def images_have_the_version_of_ray(manifests: Manifests) -> Iterator[str]:
    versions = {spec["rayVersion"] for spec in manifests.clusters}
    for pod in manifests.pods:
        if pod.component == "postgres":
            continue
        for container in pod.spec["containers"]:
            tag = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[2]
            if not any(f"ray{version}" in tag for version in versions or ray_version()):
                yield f"{pod.where}: {container['image']} is not of Ray {versions}"
        if len({container["image"] for container in pod.spec["containers"]}) > 1:
            yield f"{pod.where}: several images"
    if versions and versions != ray_version():
        yield f"RayCluster: {versions}, but this version runs {ray_version()}"


def ray_version() -> set[str]:
    """The version of Ray that `pyproject.toml` pins."""
    pinned = (CHART.parents[2] / "pyproject.toml").read_text()
    return set(re.findall(r'"ray\[[^\]]*\]==([0-9.]+)"', pinned))


@rule
def images_are_named_exactly(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        for container in pod.spec["containers"]:
            tag = container["image"].rpartition("/")[2].partition("@")[0].partition(":")[2]
            if tag in ("", "latest"):
                yield f"{pod.where}: {container['image']}"


# Security


@rule
def pods_are_restricted(manifests: Manifests) -> Iterator[str]:
    """Pods satisfy the Pod Security Standard "restricted", and have a read-only root as well."""
    for pod in manifests.pods:
        context = pod.spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
            yield f"{pod.where}: may run as root"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.where}: seccomp {context.get('seccompProfile')}"
        for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.spec.get(key):
                yield f"{pod.where}: {key}"
        for volume in pod.spec.get("volumes", ()):
            if set(volume) - {"name", "emptyDir", "persistentVolumeClaim", "projected", "configMap", "secret"}:
                yield f"{pod.where}: volume {volume}"
        for container in pod.containers:
            inner = container.get("securityContext", {})
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if inner != wanted:
                yield f"{pod.where}/{container['name']}: {inner}"
            if any("hostPort" in port for port in container.get("ports", ())):
                yield f"{pod.where}/{container['name']}: hostPort"


@rule
def read_only_roots_have_room_to_write(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        for container in pod.containers:
            home = environment(container).get("HOME", {}).get("value")
            places = {each["mountPath"] for each in container.get("volumeMounts", ()) if not each.get("readOnly")}
            needed = set() if pod.component == "test" else {"/tmp"} | ({home} if home else set())
            if pod.component not in ("postgres", "test") and not home:
                yield f"{pod.where}/{container['name']}: no HOME, which Ray writes to"
            if not needed <= places:
                yield f"{pod.where}/{container['name']}: cannot write to {sorted(needed - places)}"


@rule
def the_autoscaler_alone_has_a_token(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.where}: mounts the token of its service account"
        tokens = {each["name"] for each in pod.spec.get("volumes", ()) if "serviceAccountToken" in json.dumps(each)}
        for container in pod.containers:
            mounted = {each["name"] for each in container.get("volumeMounts", ())} & tokens
            if container["name"] != "autoscaler" and mounted:
                yield f"{pod.where}/{container['name']}: has the token"
            if container["name"] == "autoscaler" and not any(
                each["mountPath"] == TOKEN_PATH and each["name"] in tokens for each in container["volumeMounts"]
            ):
                yield f"{pod.where}: the autoscaler has no token"
    for account in manifests.of("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {account['metadata']['name']}: mounts tokens"


@rule
def pods_have_accounts_of_their_own(manifests: Manifests) -> Iterator[str]:
    accounts = {each["metadata"]["name"] for each in manifests.of("ServiceAccount")}
    for pod in manifests.pods:
        if pod.spec.get("serviceAccountName") not in accounts:
            yield f"{pod.where}: account {pod.spec.get('serviceAccountName')} is not one of {sorted(accounts)}"


@rule
def rights_are_those_of_the_autoscaler(manifests: Manifests) -> Iterator[str]:
    if manifests.of("ClusterRole") or manifests.of("ClusterRoleBinding"):
        yield "rights beyond the namespace"
    for role in manifests.of("Role"):
        for each in role["rules"]:
            allowed = {"pods": {"get", "list", "watch"}, "rayclusters": {"get", "patch"}}
            for resource in each["resources"]:
                if set(each["verbs"]) - allowed.get(resource, set()):
                    yield f"Role {role['metadata']['name']}: {resource} {each['verbs']}"
            if "rayclusters" in each["resources"] and each.get("resourceNames") != [role["metadata"]["name"]]:
                yield f"Role {role['metadata']['name']}: every RayCluster of the namespace"
    for binding in manifests.of("RoleBinding"):
        if [each["name"] for each in binding["subjects"]] != [f"{RELEASE}-mergesearch-ray-head"]:
            yield f"RoleBinding: {binding['subjects']}"
    # KubeRay makes a Role and a binding of the cluster's name, with more rights, where there are none.
    for cluster in manifests.of("RayCluster"):
        for kind in ("Role", "RoleBinding"):
            if [each["metadata"]["name"] for each in manifests.of(kind)] != [cluster["metadata"]["name"]]:
                yield f"{kind}: KubeRay would make its own"


@rule
def secrets_are_references(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        for container in pod.containers:
            for name, each in environment(container).items():
                if SECRET_NAME.search(name) and "secretKeyRef" not in each.get("valueFrom", {}):
                    yield f"{pod.where}/{container['name']}: {name} is in plain text"
            if "postgresql://" in json.dumps(container):
                yield f"{pod.where}/{container['name']}: the URL of a database is in plain text"
    for config in manifests.of("ConfigMap"):
        if re.search(r"postgresql://|auth_token|AWS_SECRET", json.dumps(config)):
            yield f"ConfigMap {config['metadata']['name']}: a secret"


@rule
def engines_know_no_database(manifests: Manifests) -> Iterator[str]:
    """Pods of engines have neither the URL of the database nor a way to it: they run models and tasks of users.

    The API shares a volume with them. It does not write the URL there, because it gets the URL and RAY_ADDRESS by
    variables.
    """
    for pod in manifests.pods:
        if pod.component == "api":
            container = pod.containers[0]
            missing = {"MERGESEARCH_DATABASE", "RAY_ADDRESS"} - set(environment(container))
            if missing or any(each.startswith("--database") for each in container["args"]):
                yield f"{pod.where}: stores the URL of the database in its volume: lacks {sorted(missing)}"
        if pod.component not in WITH_DATABASE and not manifests.of("RayJob"):
            if any("MERGESEARCH_DATABASE" in environment(container) for container in pod.containers):
                yield f"{pod.where}: has the URL of the database"
            if pod.component != "postgres" and 5432 in {
                port["port"]
                for policy in policies_of(manifests, pod)
                for each in policy["spec"].get("egress", ())
                for port in each.get("ports", ())
            }:
                yield f"{pod.where}: may connect to the database"


@rule
def secrets_and_volumes_outlive_the_release(manifests: Manifests) -> Iterator[str]:
    for kind in ("Secret", "PersistentVolumeClaim"):
        for each in manifests.of(kind):
            if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") != "keep":
                yield f"{kind} {each['metadata']['name']}: goes with the release"


# Network


def policies_of(manifests: Manifests, pod: Pod) -> list[dict[str, Any]]:
    return [each for each in manifests.of("NetworkPolicy") if selects(each["spec"]["podSelector"], pod.labels)]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", each
        if labels.get(each["key"]) not in each["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


@rule
def nothing_is_open_by_default(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        closed = {kind for each in policies_of(manifests, pod) for kind in each["spec"]["policyTypes"]}
        if closed != {"Ingress", "Egress"}:
            yield f"{pod.where}: only {sorted(closed)} is closed"
    for policy in manifests.of("NetworkPolicy"):
        for each in policy["spec"].get("ingress", ()):
            if not each.get("from") or (not each.get("ports") and not _is_among_ray(each, manifests)):
                name, ports = policy["metadata"]["name"], each.get("ports", "all ports")
                yield f"NetworkPolicy {name}: everybody may reach {ports}"


def _is_among_ray(opening: Mapping[str, Any], manifests: Manifests) -> bool:
    (peer,) = opening["from"]
    return list(peer) == ["podSelector"] and all(
        pod.is_ray for pod in manifests.pods if selects(peer["podSelector"], pod.labels)
    )


@rule
def others_reach_the_api_alone(manifests: Manifests) -> Iterator[str]:
    """Other namespaces reach only the API, the scraped metrics and, for KubeRay's operator, the dashboard."""
    allowed = {("api", 8080), ("ray-head", 8080), ("ray-worker", 8080), ("ray-head", 8265)}
    for pod in manifests.pods:
        for policy in policies_of(manifests, pod):
            for each in policy["spec"].get("ingress", ()):
                outside = [peer for peer in each["from"] if set(peer) != {"podSelector"}]
                ports = {(pod.component, port["port"]) for port in each.get("ports", [{"port": 0}])}
                if outside and not ports <= allowed:
                    yield f"{pod.where}: {outside} may reach {sorted(ports)}"
                operator = [peer for peer in outside if "kuberay" in json.dumps(peer)]
                if ("ray-head", 8265) in ports and operator != outside:
                    yield f"{pod.where}: {outside} may reach the dashboard"


@rule
def what_must_be_reached_can_be_reached(manifests: Manifests) -> Iterator[str]:
    """Each connection that the service needs is allowed at both of its ends."""
    by_component = {pod.component: pod for pod in manifests.pods}
    wanted = {
        ("api", "ray-head", 8265),
        *(("api", "ray-head", port) for port in (PORTS.start, PORTS.stop - 1)),
        ("submitter", "ray-head", 8265),
        ("ray-worker", "ray-head", 6379),
        ("ray-head", "ray-worker", 10002),
        ("test", "api", 8080),
        *((name, "postgres", 5432) for name in WITH_DATABASE),
    }
    for source, target, port in sorted(wanted):
        if source in by_component and target in by_component:
            a, b = by_component[source], by_component[target]
            if not _is_open(manifests, a, b, port, "egress", "to"):
                yield f"{source} may not connect to {target}:{port}"
            if not _is_open(manifests, b, a, port, "ingress", "from"):
                yield f"{target}:{port} may not be reached by {source}"
    for pod in manifests.pods:
        if pod.component in WITH_DATABASE and "postgres" not in by_component and "api" in by_component:
            ports = {
                port["port"]
                for policy in policies_of(manifests, pod)
                for each in policy["spec"].get("egress", ())
                if not any("podSelector" in peer for peer in each["to"])
                for port in each.get("ports", ())
            }
            if 5432 not in ports:
                yield f"{pod.where}: may not connect to the database"
            if pod.component == "ray-head" and not ports & {443, 6443}:
                yield f"{pod.where}: the autoscaler may not connect to Kubernetes"


def _is_open(manifests: Manifests, pod: Pod, other: Pod, port: int, direction: str, peers: str) -> bool:
    return any(
        any(selects(peer["podSelector"], other.labels) for peer in each[peers] if set(peer) == {"podSelector"})
        and any(first <= port <= last for first, last in _port_ranges(each, default=port))
        for policy in policies_of(manifests, pod)
        for each in policy["spec"].get(direction, ())
    )


def _port_ranges(opening: Mapping[str, Any], *, default: int) -> Iterator[tuple[int, int]]:
    for each in opening.get("ports", [{"port": default}]):
        yield each["port"], each.get("endPort", each["port"])


# Operation


@rule
def resources_are_stated(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        for container in pod.containers:
            resources = container.get("resources", {})
            if not {"cpu", "memory"} <= set(resources.get("requests", {})):
                yield f"{pod.where}/{container['name']}: requests {resources.get('requests')}"
            if "memory" not in resources.get("limits", {}):
                yield f"{pod.where}/{container['name']}: limits {resources.get('limits')}"


@rule
def long_running_containers_are_probed(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        if pod.component in ("migrate", "test", "submitter"):
            continue
        container = pod.containers[0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if not {"httpGet", "exec"} & set(container.get(probe, {})):
                yield f"{pod.where}: no {probe}"
        starts = container.get("startupProbe", {})
        if starts.get("failureThreshold", 3) * starts.get("periodSeconds", 10) < 180:
            yield f"{pod.where}: has less than 180 s to start"
        if pod.is_ray and container["livenessProbe"].get("failureThreshold", 3) < 10:
            yield f"{pod.where}: is killed while it loads"


@rule
def the_api_survives_a_lost_node(manifests: Manifests) -> Iterator[str]:
    data_modes = [
        mode
        for each in manifests.of("PersistentVolumeClaim")
        if each["metadata"]["name"].endswith("-data")
        for mode in each["spec"]["accessModes"]
    ]
    for deployment in manifests.of("Deployment"):
        spec = deployment["spec"]
        budgets = [
            each["spec"] for each in manifests.of("PodDisruptionBudget") if each["spec"]["selector"] == spec["selector"]
        ]
        if [each.get("maxUnavailable") for each in budgets] != [1]:
            yield f"API: disruption budget {budgets}"
        if spec["replicas"] > 1:
            if spec["strategy"].get("rollingUpdate", {}).get("maxUnavailable") != 0:
                yield f"API: strategy {spec['strategy']}"
            if not spec["template"]["spec"].get("topologySpreadConstraints"):
                yield "API: all replicas may be on one node"
        elif spec["strategy"]["type"] != "Recreate" and "ReadWriteOnce" in data_modes:
            yield "API: the new pod waits for the old one's volume"


@rule
def a_failed_migration_changes_nothing(manifests: Manifests) -> Iterator[str]:
    for job in manifests.of("Job"):
        notes, spec = job["metadata"].get("annotations", {}), job["spec"]
        hooks = set(notes.get("helm.sh/hook", "").split(","))
        is_trial = bool(manifests.of("StatefulSet"))
        if hooks != ({"post-install", "pre-upgrade"} if is_trial else {"pre-install", "pre-upgrade"}):
            yield f"migration: hooks {sorted(hooks)}"
        if notes.get("helm.sh/hook-output-log-policy") != "hook-failed":
            yield "migration: helm does not print why it failed"
        if "hook-failed" in notes.get("helm.sh/hook-delete-policy", ""):
            yield "migration: its log goes when it fails"
        if spec["backoffLimit"] != 0 or spec["template"]["spec"]["restartPolicy"] != "Never":
            yield "migration: is repeated when it fails"
        if not spec.get("activeDeadlineSeconds"):
            yield "migration: may take forever"
        account = spec["template"]["spec"]["serviceAccountName"]
        of_account = [each for each in manifests.of("ServiceAccount") if each["metadata"]["name"] == account]
        if any(
            each["metadata"].get("annotations", {}).get("helm.sh/hook") != notes["helm.sh/hook"] for each in of_account
        ):
            yield "migration: its account does not exist yet"
    if manifests.of("Deployment") and not manifests.of("Job"):
        yield "no migration"


@rule
def the_service_knows_its_names(manifests: Manifests) -> Iterator[str]:
    for deployment in manifests.of("Deployment"):
        arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        allowed = {each.partition("=")[2] for each in arguments if each.startswith("--allow-host=")}
        service = f"{RELEASE}-mergesearch-api"
        names = {service, f"{service}.{NAMESPACE}", f"{service}.{NAMESPACE}.svc"}
        for ingress in manifests.of("Ingress"):
            for each in ingress["spec"]["rules"]:
                names.add(each["host"])
                for path in each["http"]["paths"]:
                    if path["path"] != "/" and f"--prefix={path['path']}" not in arguments:
                        yield f"Ingress: the API does not answer below {path['path']}"
        if not names <= allowed:
            yield f"API: refuses requests to {sorted(names - allowed)}"


@rule
def models_are_read_only(manifests: Manifests) -> Iterator[str]:
    for pod in manifests.pods:
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        for container in pod.containers:
            for mount in container.get("volumeMounts", ()):
                if mount["name"] == "models":
                    claim = volumes["models"]["persistentVolumeClaim"]
                    if mount.get("readOnly") is not True or claim.get("readOnly") is not True:
                        yield f"{pod.where}/{container['name']}: may write models"


@rule
def offline_means_offline(manifests: Manifests) -> Iterator[str]:
    """Either all processes are offline or none is, and no offline process waits for the hub."""
    states = {
        pod.where: environment(pod.containers[0]).get("HF_HUB_OFFLINE", {}).get("value")
        for pod in manifests.pods
        if is_product(pod)
    }
    if len(set(states.values())) > 1:
        yield f"HF_HUB_OFFLINE differs: {states}"


@rule
def monitors_find_their_ports(manifests: Manifests) -> Iterator[str]:
    for monitor in manifests.of("ServiceMonitor"):
        selector = monitor["spec"]["selector"]
        services = [each for each in manifests.of("Service") if selects(selector, each["metadata"]["labels"])]
        ports = {port["name"] for each in services for port in each["spec"]["ports"]}
        wanted = {each["port"] for each in monitor["spec"]["endpoints"]}
        if not wanted <= ports:
            yield f"ServiceMonitor: ports {sorted(wanted)}, the Service has {sorted(ports)}"
    for monitor in manifests.of("PodMonitor"):
        pods = [pod for pod in manifests.pods if selects(monitor["spec"]["selector"], pod.labels)]
        if {pod.component for pod in pods} != {"ray-head", "ray-worker"}:
            yield f"PodMonitor: selects {sorted(pod.where for pod in pods)}"
        for pod in pods:
            if "metrics" not in {port.get("name") for port in pod.containers[0]["ports"]}:
                yield f"{pod.where}: has no port metrics"


@rule
def queued_studies_end(manifests: Manifests) -> Iterator[str]:
    """Kueue admits each study by its queue, and always gets the quota back."""
    for job in manifests.of("RayJob"):
        name, spec = job["metadata"]["name"], job["spec"]
        if len(name) > 47:
            yield f"RayJob {name}: has {len(name)} characters"
        if not job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name"):
            yield f"RayJob {name}: in no queue"
        if not spec.get("shutdownAfterJobFinishes") or "ttlSecondsAfterFinished" not in spec:
            yield f"RayJob {name}: keeps its quota after its end"
        for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
            if not spec.get(key):
                yield f"RayJob {name}: no {key}"
        cluster = spec["rayClusterSpec"]
        if cluster["enableInTreeAutoscaling"] or "upgradeStrategy" in cluster:
            yield f"RayJob {name}: its cluster changes after its admission"
        if "suspend" in spec:
            yield f"RayJob {name}: helm would overrule Kueue"
        head = cluster["headGroupSpec"]["template"]["spec"]
        if head.get("terminationGracePeriodSeconds", 30) < 60:
            yield f"RayJob {name}: chunks that are being scored are lost when it is stopped"
        if "preStop" not in head["containers"][0].get("lifecycle", {}):
            yield f"RayJob {name}: is not interrupted before its pod is stopped"
        claims = {each["metadata"]["name"] for each in manifests.of("PersistentVolumeClaim")}
        data = next(each for each in head["volumes"] if each["name"] == "data")
        if data.get("persistentVolumeClaim", {}).get("claimName") not in claims:
            yield f"RayJob {name}: its results are lost with its pod"
