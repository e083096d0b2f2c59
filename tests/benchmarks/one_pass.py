"""Exact match of merges by one teacher-forced pass instead of an engine, which makes searches of the benchmarks cheap.

A greedy completion is the reference answer exactly if every token of the answer, and then a token that ends it, is the
model's first choice after the tokens before it. One forward pass over prompt and answer shows all of these first
choices. Merging, model and references are those of the service's gradients. A path with another number of layers, or
with alignments, is built as a separate model, as in the service's verification. The scores equal the engine's if
completions must equal the answer literally (inline tasks whose answers have no white space at their ends); the benches
compare both first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.alignments.recipes import alignments_before
from workers.engines.transformers.merged_models import merged_model
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.lm_eval_tasks import content_hash
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import Reading, References, Target
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.plan import computations, plan_tensors
from workers.models.merged_files import merged_config
from workers.training.losses import minibatches
from workers.training.model import TrainableModel
from workers.types import (
    Evidence,
    Family,
    Placement,
    SampleResult,
    ScoreRequest,
    ScoreResult,
    Span,
    TaskSpec,
    digest_of,
)

__all__ = ["OnePass"]

MAX_TOKENS = 4096  # of one forward pass: its activations stay in the processor's cache


@dataclass(frozen=True)
class _Batch:
    """Rows of tokens for one forward pass.

    Logits are read at places `index` of the flattened [rows, last]; each belongs to a row and must choose one of its
    `accepted` tokens (-1: none).
    """

    samples: NDArray[np.int64]
    tokens: torch.Tensor
    last: int
    index: torch.Tensor
    row: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[int], rows: Sequence[Reading]) -> _Batch:
        width = max(len(row.tokens) for row in rows)
        first = min(row.num_context for row in rows) - 1
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        index: list[int] = []
        owner: list[int] = []
        accepted: list[tuple[int, ...]] = []
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = torch.tensor(row.tokens)
            wanted = [*((token,) for token in row.tokens[row.num_context :]), *([row.ends] if row.ends else [])]
            index += [number * (width - first) + row.num_context - 1 - first + i for i in range(len(wanted))]
            owner += [number] * len(wanted)
            accepted += wanted
        most = max(map(len, accepted))
        return cls(
            np.array(samples),
            tokens,
            width - first,
            torch.tensor(index),
            torch.tensor(owner),
            torch.tensor([[*each, *[-1] * (most - len(each))] for each in accepted]),
        )


class OnePass:
    """A scorer by one teacher-forced pass; it implements the interface `workers.types.Scorer` for coordinators.

    The scorer holds one merge at a time, in float32 on CPU. It keeps scores in files in `memory`, so that an
    interrupted search soon reaches the same point again.
    """

    def __init__(self, family: Family, options: EngineOptions, *, memory: Path) -> None:
        self._memory = memory / family.fingerprint[:16]
        self._memory.mkdir(parents=True, exist_ok=True)
        self._bank = Bank(family, Placement.MAPPED)
        self._model = TrainableModel(self._bank, torch.float32, device=self._bank.device)
        self._evaluator = TaskEvaluator(None, Prompts(self._bank.sources.result_dir, options))
        self._references = References(self._evaluator)
        self._batches: dict[tuple[str, int, int], list[_Batch]] = {}
        self._contents: dict[str, str] = {}
        self._held: Mapping[str, Hashable] = {}
        self._path: tuple[str, Any] | None = None
        self._path_models: dict[str, Any] = {}  # by configuration
        self.num_swaps = 0

    def score(self, request: ScoreRequest) -> ScoreResult:
        samples = [
            SampleResult(span.objective, position, str(position), float(is_right), "")
            for span in request.spans
            for position, is_right in enumerate(
                self.exact_matches(request.recipe, span.task, span.start, span.stop), span.start
            )
        ]
        digest = request.recipe.digest
        evidence = Evidence(
            recipe_digest=digest,
            bank_fingerprint=self._bank.fingerprint,
            prompts={span.objective: _prompts_of(span) for span in request.spans},
            weights_checksum=digest,
            replica="one-pass",
            swap_count=self.num_swaps,
            engine="teacher forcing",
            canaries=1,
        )
        return ScoreResult(tuple(samples), evidence, {})

    def exact_matches(self, recipe: Recipe, task: TaskSpec, start: int, stop: int) -> NDArray[np.bool_]:
        """Whether a merge answers each sample at the positions `start` to `stop` - 1 correctly, [stop - start]."""
        file = self._memory / f"{recipe.digest[:32]}-{self._content(task)[:16]}-{start}-{stop}.npy"
        if not file.exists():
            found = self._read(self._holding(recipe), self._prepared(task, start, stop), stop - start)
            part = file.with_suffix(f".{os.getpid()}.npy")  # other processes may score the same
            np.save(part, found)
            part.rename(file)
        known: NDArray[np.bool_] = np.load(file)
        return known

    def num_samples(self, task: TaskSpec) -> int:
        return len(self._references.targets(task))

    def documents(self, task: TaskSpec) -> NDArray[np.int64]:
        """The index of each sample in its task's data, in the order of positions, [samples]."""
        return np.array([index for _, index in self._evaluator.task(task).order])

    def _content(self, task: TaskSpec) -> str:
        """Digest of a task by its file's content, so that scores are also found in another clone."""
        if task.digest not in self._contents:
            assert isinstance(task.task, Mapping)
            rendering = {key: value for key, value in task.task.items() if key != "file"}
            content = content_hash(task.task["file"])
            self._contents[task.digest] = replace(task, task=rendering, content=content).digest
        return self._contents[task.digest]

    def _holding(self, recipe: Recipe) -> Any:
        """The transformers model with the merge of a recipe."""
        if len(recipe.layers) == self._bank.layout.num_layers and not any(alignments_before(recipe)):
            self._hold(recipe)
            return self._model.module
        if self._path is None or self._path[0] != recipe.digest:
            self._path = None
            self._path = recipe.digest, self._path_model(recipe)
        return self._path[1]

    def _path_model(self, recipe: Recipe) -> Any:
        """The transformers model of a path; paths without alignments and of equal configuration share one."""
        if any(alignments_before(recipe)):
            return merged_model(recipe, self._bank, dtype="float32")
        config = merged_config(recipe, self._bank.base, self._bank.views(recipe.models), dtype="float32")
        key = json.dumps(config, sort_keys=True)
        if (model := self._path_models.get(key)) is None:
            model = self._path_models[key] = merged_model(recipe, self._bank, dtype="float32")
            return model
        plan = plan_tensors(recipe, self._bank)
        given = dict(merged_tensors(plan, self._bank, torch.float32))
        found = model.load_state_dict(given, strict=False)
        written = {model.get_parameter(name).data_ptr() for name in given if name not in found.unexpected_keys}
        stale = [name for name in found.missing_keys if model.get_parameter(name).data_ptr() not in written]
        if found.unexpected_keys or stale:
            raise RuntimeError(f"the merge does not fit its model: {found.unexpected_keys} {stale}")
        return model

    def _hold(self, recipe: Recipe) -> None:
        plan = plan_tensors(recipe, self._bank)
        wanted = computations(plan, self._bank)
        changed = {name: memory for name, memory in self._model.memory.items() if self._held.get(name) != wanted[name]}
        if changed:
            self.num_swaps += 1
            self._held = {}
            with torch.no_grad():
                merge_into(plan, self._bank, changed)
        self._held = wanted

    def _prepared(self, task: TaskSpec, start: int, stop: int) -> list[_Batch]:
        key = task.digest, start, stop
        if key not in self._batches:
            targets = self._references.targets(task)[start:stop]
            self._batches[key] = [
                _Batch.of(indices, [_only_reading(targets[i]) for i in indices])
                for indices in minibatches(targets, MAX_TOKENS)
            ]
        return self._batches[key]

    @torch.inference_mode()
    def _read(self, model: Any, batches: Sequence[_Batch], num_samples: int) -> NDArray[np.bool_]:
        is_right = np.zeros(num_samples, dtype=np.bool_)
        for batch in batches:
            output = model(input_ids=batch.tokens, use_cache=False, logits_to_keep=batch.last)
            logits = output.logits[:, -batch.last :].flatten(0, 1)
            chosen = logits.index_select(0, batch.index).argmax(-1)
            is_wrong = (chosen[:, None] != batch.accepted).all(1)
            wrong = torch.zeros(len(batch.tokens)).index_add(0, batch.row, is_wrong.float())
            is_right[batch.samples] = (wrong == 0).numpy()
        return is_right


def _only_reading(target: Target) -> Reading:
    if target.scales is not None or len(target.readings) != 1:
        raise ValueError(
            "one pass decides exact match with a single reference; this sample has options or alternatives"
        )
    return target.readings[0]


def _prompts_of(span: Span) -> str:
    return digest_of([span.task.digest, span.start, span.stop])
