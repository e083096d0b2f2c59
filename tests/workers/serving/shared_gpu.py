"""An engine and a gradient actor on one GPU that Ray believes in; run as a program, it prints what Ray gave to them."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray

from search_spaces.study.engine import EngineOptions
from service.store.steps import LossesRequest
from service.tune.proposing import ray_gradients
from service.tune.proposing.gradient_actor import GradientInputs
from service.tune.proposing.ray_gradients import RayGradients
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import Family, GpuNeed, ModelSource

FAMILY = Family(ModelSource("base", "/nowhere", "0" * 64), ())
OPTIONS = EngineOptions(gpu_share_left=0.4, threads=1)
ASKED = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")


class Seen:
    """In place of the gradient actor: its result has the environment that the process got."""

    def __init__(self, inputs: GradientInputs) -> None:
        self.device = inputs.device

    def run(self, request: LossesRequest) -> dict[str, Any]:
        return {"device": self.device, **{name: os.environ.get(name) for name in ASKED}}


class SeenScorer(FakeScorer):
    """A fake engine that says in a file which GPUs its process got."""

    def __init__(self, file: str) -> None:
        super().__init__()
        with open(file, "w") as out:
            json.dump(os.environ.get("CUDA_VISIBLE_DEVICES"), out)


def free_gpus() -> float:
    return round(float(ray.available_resources().get("GPU", 0.0)), 4)


def seen_by(gradients: RayGradients) -> Any:
    gradients.begin(LossesRequest(label="", point=(), positions={}))
    while (found := gradients.result(timeout_s=60.0)) is None:
        pass
    return found


def main(file: str) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    said: dict[str, Any] = {}
    deploy_scorer(FAMILY, OPTIONS, gpus=GpuNeed.NEEDED, make_worker=lambda: SeenScorer(file))
    said["left by the engine"] = free_gpus()
    with open(file) as written:
        said["engine"] = json.load(written)
    vars(ray_gradients)["SharingActor"] = vars(ray_gradients)["GradientActor"] = Seen
    inputs = GradientInputs(FAMILY, OPTIONS, {}, device="cuda")
    first, second = RayGradients(inputs), RayGradients(inputs)
    said["first"], said["left by both"] = seen_by(first), free_gpus()
    said["second"] = seen_by(second)
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
