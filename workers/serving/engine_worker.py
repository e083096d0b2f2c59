"""Worker of a replica: a warm inference engine, and the evaluation tasks prepared for it."""

from __future__ import annotations

import errno
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.cache import cache_dir
from workers.directories import scratch
from workers.engines.rank_threads import threads_of_ranks
from workers.engines.source_recipes import base_recipe
from workers.engines.transformers.batches import batch_bytes
from workers.engines.vllm.engine import Engine
from workers.errors import InvalidPrompt, InvalidTask
from workers.evaluation.metric_process import MetricProcess
from workers.evaluation.prompts import LOGPROB_TOLERANCE, Generation
from workers.serving.completion_prompts import generation_of
from workers.serving.completions import CompletionBatch, CompletionPart, LiveCompletion
from workers.serving.process_logs import log_file
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

__all__ = ["EngineWorker"]


@dataclass(frozen=True)
class _Stream:
    """Adapter that passes the engine's generated text on to the completion `live`.

    The class implements the interface `workers.evaluation.prompts.Stream`, which the engine expects. `generation` has
    the prompt's tokens and the options, and `digest` is the digest of the recipe whose merge the engine holds.
    """

    live: LiveCompletion
    generation: Generation
    digest: str

    @property
    def is_cancelled(self) -> bool:
        return self.live.is_cancelled

    def add(self, text: str, num_tokens: int, finish_reason: str | None) -> None:
        self.live.add(CompletionPart(text, num_tokens, len(self.generation.tokens), self.digest, finish_reason))


class EngineWorker:
    """Worker of a replica: it has an inference engine, and scores merges with it.

    The engine starts when the object is made, and then serves all requests. The most recently used evaluation tasks
    stay loaded. `family` has the base model and its experts, and `options` are the options of the engine.
    `most_engines` is the largest number of equal engines in the cluster, from which each engine computes its share of
    its machine's memory; None means one for each GPU. `verify_elsewhere` verifies an export in another process
    (function `gpu_verification.verify_on_free_gpus`). If it returns None or is not given, this process verifies. Raises
    EngineUnavailable if the engine does not start.
    """

    _verify_elsewhere: Callable[..., VerificationReport | None] | None = None

    def __init__(
        self,
        family: Family,
        options: EngineOptions,
        *,
        most_engines: int | None = None,
        verify_elsewhere: Callable[..., VerificationReport | None] | None = None,
    ) -> None:
        self._verify_elsewhere = verify_elsewhere
        from workers.evaluation.lm_eval import TaskEvaluator

        # Process ids repeat, and samples scored before a fault must be told from those scored after it.
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        metrics = MetricProcess()  # it starts while the engine does
        self.engine = Engine(family, options, log_file=log_file(), name=self.name, most_engines=most_engines)
        self.evaluator = TaskEvaluator(self.engine, self.engine.prompts, metrics=metrics)
        self.busy_s = 0.0

    def base_recipe(self) -> Recipe:
        return base_recipe(self.engine.family)

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

    def complete(self, batch: CompletionBatch, check: Callable[[], None]) -> None:
        """Write the merge of the batch's recipe into the engine, and generate completions until none runs or waits.

        `check` is called before each step of the engine; an error that it raises ends the completions. Raises
        TrialFailed if the merge cannot be computed or its logits are not finite. Raises EngineFault if the engine holds
        another recipe or failed a check.
        """
        digest = batch.recipe.digest
        swap = self.engine.swap(batch.recipe)
        started = time.perf_counter()

        def take(is_generating: bool) -> list[_Stream]:
            check()
            return list(self._begun(batch, closes=not is_generating))

        try:
            self.engine.stream(take)
        finally:
            self.busy_s += swap.materialise_s + swap.swap_s + time.perf_counter() - started
        if (held := self.engine.held_digest) != digest:
            raise self.engine.fault(f"asked for recipe {digest}; the engine held {held} after completions with it")

    def _begun(self, batch: CompletionBatch, *, closes: bool) -> Iterator[_Stream]:
        """Yield the completions that have joined `batch` since the last call, with tokenized prompts.

        A completion whose prompt is invalid ends with the error. If `closes` is True and no valid completion has
        joined, the batch is closed, so that no further completion can join it.
        """
        while taken := batch.take(closes=closes):
            for live in taken:
                try:
                    yield _Stream(live, generation_of(live.request, self.engine.prompts), batch.recipe.digest)
                    closes = False
                except InvalidPrompt as error:
                    live.fail(error)
            if not closes:
                return

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        return tuple(map(self.evaluator.describe, tasks))

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        return self.evaluator.sample_texts(task, start, stop)

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        """Raise InvalidTask, because the samples of text tasks have no pictures."""
        raise InvalidTask(f"{task.task}: is a task of text, whose samples have no pictures; give an image task")

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Score samples of a merge again with plain transformers, and compare with the engine's results in `samples`.

        `spans` are the ranges of samples to compare. The merge of `recipe` is computed on the CPU and written to a
        temporary checkpoint. transformers loads the checkpoint and computes in float32, on a free GPU of this machine
        (module `gpu_verification`) or else on the CPU, with the threads of all ranks of the engine. If the recipe has
        alignments (maps between layers), the merged model is built in transformers without files, because an ordinary
        checkpoint cannot contain it. Returns a report of 0 samples if nothing can be compared, or if no disk has enough
        space.
        """
        from workers.engines.transformers.verification import nothing_to_compare

        engine = self.engine
        depth = len(recipe.layers) / len(base_recipe(engine.family).layers)
        if reason := nothing_to_compare(engine.family.base.directory, self.evaluator, spans, depth=depth):
            return _not_verified(recipe, engine.dtype, reason)
        engine.swap(recipe)
        with threads_of_ranks(engine.options.tensor_parallel_size):
            return self._verify_held(recipe, samples, spans)

    def _verify_held(
        self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]
    ) -> VerificationReport:
        """Verify the merge of `recipe`, which the engine holds, as the method `verify` does."""
        import torch

        from workers.engines.transformers.merged_models import merged_model
        from workers.engines.transformers.verification import texts_to_read, verify
        from workers.engines.vllm.worker_extension import family_to_json, open_bank
        from workers.export.checkpoint import export
        from workers.merging.plan import merged_names

        engine = self.engine
        texts = texts_to_read(self.evaluator, samples, spans)
        # Users' exports are computed on the CPU, also where the engine merges on a GPU.
        bank = open_bank(family_to_json(engine.family)).on("cpu")
        dtype = getattr(torch, engine.dtype)
        if any(layer.alignment for layer in recipe.layers):
            arguments = (recipe.digest, engine.prompts.directory, engine.options)
            model = merged_model(recipe, bank, dtype=engine.dtype)
            return verify(*arguments, **self._compared(samples, spans, texts), evaluator=self.evaluator, model=model)
        num_parameters = sum(map(math.prod, merged_names(recipe, bank).values()))
        try:
            with scratch(
                num_parameters * dtype.itemsize,
                name="mergesearch-verify",
                places=[Path(tempfile.gettempdir()), cache_dir() / "scratch"],
            ) as place:
                directory = place / "merge"
                export(recipe, bank, directory, dtype=dtype)
                arguments = (recipe.digest, str(directory), engine.options)
                options = self._compared(samples, spans, texts)
                if self._verify_elsewhere is not None:
                    report = self._verify_elsewhere(
                        arguments,
                        options,
                        num_parameters=num_parameters,
                        batch_bytes=self._batch_bytes(spans, num_layers=len(recipe.layers)),
                        share=engine.options.gpu_share_left,
                    )
                    if report is not None:
                        return report
                return verify(*arguments, **options, evaluator=self.evaluator)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return _not_verified(recipe, engine.dtype, f"the export of the merge cannot be written: {error}")

    def _batch_bytes(self, spans: Sequence[Span], *, num_layers: int) -> int:
        """Bytes of the largest batch of samples of `spans` that transformers completes at once, without the weights.

        `num_layers` is the number of layers of the merge.
        """
        requests = (
            request
            for span in spans
            if self.evaluator.is_greedy(span.task)
            for position in range(span.start, span.stop)
            for request in self.evaluator.requests(span.task, position)
        )
        lengths = [(len(each.tokens), each.max_tokens) for each in requests if isinstance(each, Generation)]
        return batch_bytes({**self.engine.prompts.config, "num_hidden_layers": num_layers}, lengths)

    def _compared(
        self, samples: tuple[SampleResult, ...], spans: tuple[Span, ...], texts: Sequence[tuple[int, ...]]
    ) -> dict[str, Any]:
        """Keyword arguments of the function `verification.verify` that state the engine's results.

        They contain `samples`, `spans` (the ranges of samples to compare), the engine's dtype, and the
        log-probabilities of the tokens of `texts`, which the engine computes with the merge that it holds.
        """
        return {
            "samples": samples,
            "spans": spans,
            "dtype": self.engine.dtype,
            "engine_logprobs": dict(zip(texts, self.engine.logprobs(texts), strict=True)),
        }

    def check(self) -> tuple[CanaryReport, ...]:
        return (self.engine.check(),)

    def close(self) -> None:
        """Shut the engine down, and leave the memory that processes of this machine share; may be called twice."""
        self.engine.close()

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


def _not_verified(recipe: Recipe, dtype: str, reason: str) -> VerificationReport:
    """Make a report which states that no sample of the merge of `recipe` was compared, and why.

    `dtype` is the engine's dtype.
    """
    return VerificationReport(recipe.digest, 0, 0, 0.0, LOGPROB_TOLERANCE[dtype], (), 0, reason=reason)
