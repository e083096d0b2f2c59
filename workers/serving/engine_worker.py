"""Worker of a replica: a warm inference engine, and the evaluation tasks prepared for it."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.source_recipes import base_recipe
from workers.engines.vllm.engine import Engine
from workers.evaluation.metric_process import MetricProcess
from workers.evaluation.prompts import LOGPROB_TOLERANCE
from workers.serving.process_logs import log_file
from workers.types import (
    CanaryReport,
    Evidence,
    Family,
    SampleResult,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskInfo,
    TaskSpec,
    VerificationReport,
)

__all__ = ["EngineWorker"]


class EngineWorker:
    """Worker of a replica that owns a warm inference engine and the evaluation tasks prepared for it.

    Raises EngineUnavailable if the engine does not start.
    """

    def __init__(self, family: Family, options: EngineOptions) -> None:
        from workers.evaluation.lm_eval import TaskEvaluator

        # Process ids repeat, and samples scored before a fault must be told from those scored after it.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        metrics = MetricProcess()  # it starts while the engine does
        self.engine = Engine(family, options, log_file=log_file(), name=self.name)
        self.evaluator = TaskEvaluator(self.engine, self.engine.prompts, metrics=metrics)
        self.busy_s = 0.0

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Write the merge of the request's recipe into the engine, and score the request's samples.

        Raises TrialFailed (or its subclass MetricFailed) if the merge cannot be scored, InvalidTask if a task cannot be
        used, and EngineFault if the engine holds another recipe or failed a check.
        """
        swap = self.engine.swap(request.recipe)
        started = time.perf_counter()
        held = self.engine.held_digest
        canaries = self.engine.canary.num_passed
        scored = self.evaluator.score(request.spans)
        if held is None or not held == self.engine.held_digest == request.recipe.digest:
            raise self.engine.fault(
                f"asked for recipe {request.recipe.digest}; the engine held {held} before scoring and "
                f"{self.engine.held_digest} after it"
            )
        score_s = time.perf_counter() - started
        confined_by = self.evaluator.confined_by(request.spans)
        self.busy_s += swap.materialise_s + swap.swap_s + score_s
        return ScoreResult(
            samples=scored.samples,
            evidence=Evidence(
                recipe_digest=held,
                bank_fingerprint=self.engine.bank_fingerprint,
                prompts=scored.prompts,
                weights_checksum=swap.weights_checksum,
                replica=self.name,
                swap_count=swap.swap_count,
                engine=f"vllm, {self.engine.dtype}, {self.engine.sources}"
                + (f", {swap.off_device}" if swap.off_device else "")
                + (f", on each rank {swap.whole}" if swap.whole else "")
                + (f", code of tasks confined by {confined_by}" if confined_by else ""),
                canaries=canaries,
            ),
            timings_s={"materialise": swap.materialise_s, "swap": swap.swap_s, "score": score_s, "wait": 0.0},
        )

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        return tuple(map(self.evaluator.describe, tasks))

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Score samples again by plain transformers on the exported recipe, and compare with `samples`.

        The checkpoint is computed on the CPU, and transformers computes in float32. A recipe with alignments, which has
        no ordinary checkpoint, is built in transformers instead. Returns a report of 0 samples if nothing can be
        compared.
        """
        import torch

        from workers.engines.transformers.merged_models import merged_model
        from workers.engines.transformers.verification import nothing_to_compare, texts_to_read, verify
        from workers.engines.vllm.worker_extension import family_to_json, open_bank
        from workers.export.checkpoint import export

        engine = self.engine
        depth = len(recipe.layers) / len(base_recipe(engine.family).layers)
        if reason := nothing_to_compare(engine.family.base.directory, self.evaluator, spans, depth=depth):
            return VerificationReport(recipe.digest, 0, 0, 0.0, LOGPROB_TOLERANCE[engine.dtype], (), 0, reason=reason)
        engine.swap(recipe)
        texts = texts_to_read(self.evaluator, samples, spans)
        # Users' exports are computed on the CPU, also where the engine merges on a GPU.
        bank, model = open_bank(family_to_json(engine.family)).on("cpu"), None
        with tempfile.TemporaryDirectory(prefix="mergesearch-verify-") as directory:
            if any(layer.alignment for layer in recipe.layers):
                model = merged_model(recipe, bank, dtype=engine.dtype)
            else:
                export(recipe, bank, directory, dtype=getattr(torch, engine.dtype))
            return verify(
                recipe.digest,
                directory if model is None else engine.prompts.directory,
                engine.options,
                samples=samples,
                spans=spans,
                dtype=engine.dtype,
                engine_logprobs=dict(zip(texts, engine.logprobs(texts), strict=True)),
                evaluator=self.evaluator,
                model=model,
            )

    def check(self) -> tuple[CanaryReport, ...]:
        return (self.engine.check(),)

    def statistics(self) -> Mapping[str, Any]:
        return {
            "starts": 1,
            "start_s": [self.engine.start_s],
            "canaries": self.engine.canary.num_passed,
            "canaries_skipped": self.engine.canary.num_skipped,
            "swaps": self.engine.swap_count,
            "swap_s": list(self.engine.swap_s),
            "busy_s": self.busy_s,
            "bank": self.engine.bank_summary,
        }
