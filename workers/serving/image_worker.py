"""Worker of a replica for image classifiers: a warm engine in torch, and the image tasks prepared for it."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidPrompt
from workers.serving.completions import CompletionBatch
from workers.types import (
    CanaryReport,
    Evidence,
    Family,
    SamplePictures,
    SampleResult,
    SampleTexts,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskInfo,
    TaskSpec,
    VerificationReport,
)

__all__ = ["ImageWorker"]


class ImageWorker:
    """Worker of a replica for image classifiers; it implements the interface `workers.serving.replica.Worker`.

    `family` has the base model and its experts, and `options` are the options of the engine. `device` is the engine's
    device. Raises EngineUnavailable if the engine does not start.
    """

    def __init__(self, family: Family, options: EngineOptions, *, device: str) -> None:
        import torch

        from workers.engines.images.engine import ImageEngine
        from workers.engines.images.pixels import Pixels
        from workers.engines.images.scoring import ImageEvaluator

        if options.threads:
            torch.set_num_threads(options.threads)
        # Process ids repeat, and samples scored before a fault must be told from those scored after it.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.engine = ImageEngine(family, options, device=device, name=self.name)
        self.pixels = Pixels(self.engine.sources.result_dir)
        self.evaluator = ImageEvaluator(
            self.engine.sources,
            self.engine.features,
            self.pixels,
            dtype=self.engine.dtype,
            device=self.engine.device,
        )
        self.busy_s = 0.0

    def base_recipe(self) -> Recipe:
        return self.engine.base_recipe

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Write the merge of the request's recipe into the engine, and score the request's samples.

        Raises TrialFailed if the merge cannot be scored, InvalidTask if a task cannot be used, and EngineFault if the
        engine holds another recipe or failed a check.
        """
        swap = self.engine.swap(request.recipe)
        started = time.perf_counter()
        canaries = self.engine.num_passed
        with self.engine.whole(request.recipe):
            samples = self.evaluator.score(request.spans)
        score_s = time.perf_counter() - started
        self.busy_s += swap.materialise_s + swap.swap_s + score_s
        return ScoreResult(
            samples=samples,
            evidence=Evidence(
                recipe_digest=request.recipe.digest,
                bank_fingerprint=self.engine.bank.fingerprint,
                prompts={span.objective: self.evaluator.prompts(span) for span in request.spans},
                weights_checksum=swap.weights_checksum,
                replica=self.name,
                swap_count=swap.swap_count,
                engine=f"torch, {self.engine.device.type}, {self.engine.dtype}, {self.engine.description}",
                canaries=canaries,
            ),
            timings_s={"materialise": swap.materialise_s, "swap": swap.swap_s, "score": score_s, "wait": 0.0},
        )

    def complete(self, batch: CompletionBatch, check: Callable[[], None]) -> None:
        """End every completion of the batch with the error InvalidPrompt: image classifiers generate no text."""
        while taken := batch.take(closes=True):
            for live in taken:
                live.fail(InvalidPrompt("image classifiers complete no prompts", "model"))

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        return tuple(map(self.evaluator.describe, tasks))

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        return self.evaluator.sample_texts(task, start, stop)

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        return self.evaluator.sample_pictures(task, start, stop)

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Score samples of a merge again with transformers, and compare with the engine's results in `samples`.

        `spans` are the ranges of samples to compare. The merge of `recipe` is computed on the CPU and exported to a
        temporary directory, from which transformers loads it.
        """
        import torch

        from workers.engines.images.verification import verify_images
        from workers.export.checkpoint import export

        with tempfile.TemporaryDirectory(prefix="mergesearch-verify-") as directory:
            export(recipe, self.engine.bank.on("cpu"), directory, dtype=getattr(torch, self.engine.dtype))
            return verify_images(
                recipe.digest,
                directory,
                samples=samples,
                spans=spans,
                dtype=self.engine.dtype,
                evaluator=self.evaluator,
            )

    def check(self) -> tuple[CanaryReport, ...]:
        return (self.engine.check(),)

    def close(self) -> None:
        """Do nothing: an engine in torch shares no memory with other processes, and ends with its process."""

    def statistics(self) -> Mapping[str, Any]:
        return {
            "starts": 1,
            "start_s": [self.engine.start_s],
            "canaries": self.engine.num_passed,
            "canaries_skipped": self.engine.num_skipped,
            "swaps": self.engine.swap_count,
            "swap_s": list(self.engine.swap_s),
            "busy_s": self.busy_s,
            "bank": self.engine.bank.summary() | {"reason": ""},
        }
