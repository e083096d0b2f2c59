"""The chart's values in a plan of a study: the real helm renders them for every kind of machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from search_spaces.study.file import load_study
from service.studies.planning.chart import chart_values
from service.studies.planning.named import profile_named
from service.studies.planning.placement import StudyPlacement
from service.studies.planning.profiles import KINDS
from tests.deploy.chart import STUDY, Helm

PLACEMENT = StudyPlacement(
    (),
    "host",
    "",
    nodes=2,
    engines=1,
    texts=1,
    gpu_capacity=0,
    host_capacity=0,
    lacks=(),
    verification_gpus=0,
    num_parameters=0,
    verified_together=1,
)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_values_of_a_plan_render(helm: Helm, tmp_path: Path, kind: str) -> None:
    """A plan's values, laid over a profile of the chart, give nodes with the GPUs and the number that the plan has."""
    profile = profile_named(f"{kind}x8")
    values = tmp_path / "values.yaml"
    found = chart_values(load_study(STUDY), profile, PLACEMENT, sources_bytes=10**11)
    values.write_text(yaml.safe_dump(found))
    base = "single-gpu" if profile.gpus else "cpu-dev"
    (cluster,) = helm.manifests(base, "--values", values).clusters
    (group,) = [each for each in cluster["workerGroupSpecs"] if each["maxReplicas"] == PLACEMENT.nodes]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits["memory"] == f"{int(0.9 * profile.host_bytes / 2**30)}Gi"
    assert int(limits.get("nvidia.com/gpu", 0)) == profile.gpus
