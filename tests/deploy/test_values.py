"""Values that the chart refuses. Its messages say the place, the problem and the accepted values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.engine_machines import VARIABLE, parse_machines
from tests.deploy.chart import CHART, NAMESPACE, PROFILES, Helm, values_of

REFUSED: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.mark.parametrize("case", REFUSED, ids=[case["name"].replace(" ", "-") for case in REFUSED])
def test_wrong_values_are_refused(case: dict[str, Any], helm: Helm, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(case["values"]))
    base = values_of(case["profile"])[:2] if "kueue" in case["values"] else values_of(case["profile"])
    done = helm.run("template", "demo", CHART, "--namespace", NAMESPACE, *base, "--values", values)
    assert (done.returncode, done.stdout) == (1, "")
    assert case["message"] in done.stderr


def test_the_corpus_is_large_and_of_every_kind() -> None:
    assert len({case["name"] for case in REFUSED}) == len(REFUSED) >= 60
    assert {case["profile"] for case in REFUSED} <= set(PROFILES)
    messages = [case["message"] for case in REFUSED]
    for sign in ("got string", "additional properties", "missing property", "refused:", "plain text", "two groups"):
        assert any(sign in message for message in messages), sign


def test_plain_values_ask_for_a_profile(helm: Helm) -> None:
    """An install without any value starts nothing, and says which file to begin with."""
    done = helm.run("template", "demo", CHART)
    assert done.returncode == 1
    assert "name the GPU nodes (see profiles/single-gpu.yaml), or set image.variant=cpu" in done.stderr


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (
            "a-release-of-thirty-two-characters",
            'makes object names of 46 characters ("a-release-of-thirty-two-characters-mer',
        ),
        ("1st", 'release name: "1st" begins with a digit, which names of RayClusters may not: begin it with a letter'),
    ],
)
def test_releases_that_ray_cannot_name_are_refused(release: str, message: str, helm: Helm) -> None:
    done = helm.run("template", release, CHART, *values_of("cpu-dev"))
    assert done.returncode == 1
    assert message in done.stderr


def test_the_schema_knows_every_value() -> None:
    """A key that only values.yaml or only the schema has is a mistake."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def keys(known: Any, place: str) -> set[str]:
        known = _resolved(known, schema)
        found = set()
        for name, each in known.get("properties", {}).items():
            if "const" not in each:
                found |= {f"{place}.{name}"} | keys(each, f"{place}.{name}")
        return found

    def given(part: Any, place: str) -> set[str]:
        found = set()
        for name, each in part.items() if isinstance(part, dict) else ():
            found |= {f"{place}.{name}"} | given(each, f"{place}.{name}")
        return found

    optional = {".global"} | {key for key in keys(schema, "") if key.endswith(".resources.limits.cpu")}
    assert given(values, "") - keys(schema, "") <= {
        key
        for key in given(values, "")
        if key.startswith((".ingress.annotations.", ".monitoring.dashboardLabels.", ".networkPolicy."))
    }
    assert keys(schema, "") - given(values, "") <= optional


def _resolved(known: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in known:
        found: dict[str, Any] = schema["$defs"][known["$ref"].rpartition("/")[2]]
        return found
    return known


def test_the_memory_of_gpus_is_stated(helm: Helm) -> None:
    manifests = helm.manifests("multi-gpu", "--set", "ray.gpuGroups[1].gpuMemory=48G")
    (pod,) = [pod for pod in manifests.pods if pod.component == "ray-head"]
    (text,) = [each["value"] for each in pod.containers[0]["env"] if each["name"] == VARIABLE]
    assert [machines.gpu_bytes for machines in parse_machines(text)] == [None, None, 48 * 10**9]
