"""Made-up studies of many trials, written directly into a database, and kept for later runs.

A study has 9 baselines and the proposed trials: layer-wise task arithmetic of three experts in every component of 32
layers. Every trial is scored at each rung up to the last, so that the numbers of samples are the largest that a study
of this size can have. One trial in 100 has failed at the last rung. Baselines and the best trials are scored on
holdout data too. Answers are a few words long, and alike: one of 20 texts of a chunk is drawn for each chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from search_spaces.study.file import parse_study
from service.resolved_study import ResolvedStudy
from service.results.selection import held_out
from service.store import BracketRecord, Store, schema
from service.store.samples import pack_documents, pack_texts, pack_values
from service.types import EventKind, JobState, Origin, TrialResult, TrialState
from tests.service.resolved import resolved_study
from workers.types import Evidence, SampleResult, ScoreResult, Split

EXPERTS = ("math", "code", "text")
OBJECTIVES = ("gsm8k", "humaneval", "mmlu")
FINGERPRINTS = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("base", *EXPERTS)}
LABELS = ("average", "task_arithmetic:0.3", "task_arithmetic:0.4", "ties:1.0:0.2", "dare:0.5")
FAILED_EVERY = 100
NUM_TEXTS = 20
NUMBERED = (schema.evidence, schema.sample_documents)
# Trials in one transaction.
BATCH = 500


@dataclass(frozen=True)
class Size:
    """Size of a made-up study; `rungs` are numbers of samples of each objective."""

    num_trials: int = 10_000
    num_layers: int = 32
    rungs: tuple[int, ...] = (111, 333, 1000)
    num_holdout: int = 1000

    @property
    def name(self) -> str:
        """Name of the study, by which a later run finds it."""
        return f"scale-{self.num_trials}-{self.num_layers}-{self.rungs[-1]}"


def stored_study(store: Store, size: Size) -> str:
    """Id of the complete study of this `size` in the store; a missing study is written first."""
    found = [job for job in store.jobs("search") if job.name == size.name and job.state is JobState.COMPLETE]
    return found[0].id if found else _write(store, size)


def _write(store: Store, size: Size) -> str:
    job = store.create_job(kind="search", name=size.name, document=_document(size), accepted=_accepted(size))
    store.open_attempt(job.id).set_state(JobState.RUNNING)
    rows = _Rows(job.id, size, first_id=_last_id(store))
    store.open_attempt(job.id).open_bracket(BracketRecord(0, 0, size.num_trials))
    _insert(store, {"sample_documents": rows.documents()})
    batch: dict[str, list[dict[str, Any]]] = {}
    for number, trial in enumerate(rows.trials()):
        for table, found in trial.items():
            batch.setdefault(table, []).extend(found)
        if number % BATCH == BATCH - 1:
            _insert(store, batch)
            batch = {}
    _insert(store, batch)
    _count_on(store)
    writer = store.open_attempt(job.id)
    objectives = ResolvedStudy.of(job).objectives
    for result in held_out(store.trial_results(job.id), objectives):
        writer.record_chunk(result.number, Split.HOLDOUT, rows.holdout(result))
    writer.set_state(JobState.COMPLETE)
    return job.id


def _last_id(store: Store) -> int:
    """The largest id in the tables whose rows are written with explicit ids."""
    with store.engine.connect() as connection:
        ids = (connection.execute(sa.select(sa.func.max(table.c.id))).scalar() for table in NUMBERED)
        return max(found or 0 for found in ids)


def _count_on(store: Store) -> None:
    """Make PostgreSQL number further rows after the rows that were written with explicit ids."""
    if store.engine.dialect.name == "postgresql":
        with store.engine.begin() as connection:
            for table in NUMBERED:
                sequence = f"pg_get_serial_sequence('{table.name}', 'id')"
                connection.execute(sa.text(f"SELECT setval({sequence}, (SELECT max(id) FROM {table.name}))"))


def _insert(store: Store, batch: dict[str, list[dict[str, Any]]]) -> None:
    with store.engine.begin() as connection:
        for name, rows in batch.items():
            connection.execute(sa.insert(schema.metadata.tables[name]), rows)


def _document(size: Size) -> dict[str, Any]:
    objectives = [{"name": name, "task": name, "metric": "exact_match"} for name in OBJECTIVES]
    document = {
        "name": size.name,
        "models": {"base": "some/base", "experts": {name: f"some/{name}" for name in EXPERTS}},
        "search_space": {"kind": "layerwise", "granularity": "component"},
        "search": {"algorithm": "random", "max_trials": size.num_trials},
        "fidelity": {"scheduler": "asha", "rungs": list(size.rungs)},
        "objectives": objectives,
        "holdout": [{**objective, "split": "validation"} for objective in objectives],
    }
    return parse_study(document).canonical()


def _accepted(size: Size) -> dict[str, Any]:
    from search_spaces.objectives import Objective

    return resolved_study(
        fingerprints=FINGERPRINTS,
        num_layers=size.num_layers,
        tasks=dict.fromkeys(OBJECTIVES, "0"),
        holdout_tasks=dict.fromkeys(OBJECTIVES, "0"),
        rung_samples=tuple(dict.fromkeys(OBJECTIVES, samples) for samples in size.rungs),
        objectives=tuple(Objective(name, "exact_match", "maximize", None) for name in OBJECTIVES),
        algorithm="random",
    ).to_json()


class _Rows:
    """Rows of every trial of a made-up study, by table."""

    def __init__(self, study: str, size: Size, *, first_id: int) -> None:
        self._study = study
        self._size = size
        self._rng = np.random.default_rng(0)
        self._now = time.time() - 86_400
        self._num_evidence = first_id
        spans = list(itertools.pairwise((0, *size.rungs)))
        self._texts = {span: [self._made_up_texts(*span) for _ in range(NUM_TEXTS)] for span in spans}
        places = itertools.product(OBJECTIVES, spans)
        self._documents = {
            (name, start): number for number, (name, (start, _)) in enumerate(places, start=first_id + 1)
        }

    def documents(self) -> list[dict[str, Any]]:
        """Rows with the lists of documents that all recipes share."""
        stops = dict(itertools.pairwise((0, *self._size.rungs)))
        return [
            {
                "id": number,
                "study": self._study,
                "digest": f"{number:064}",
                "packed": pack_documents([f"{5 * position}" for position in range(start, stops[start])]),
            }
            for (_, start), number in self._documents.items()
        ]

    def holdout(self, trial: TrialResult) -> ScoreResult:
        """Result of the trial's recipe on the holdout data."""
        digest, prompts = (
            trial.recipe.digest,
            {f"holdout {name}[0:{self._size.num_holdout}]": "0" for name in OBJECTIVES},
        )
        samples = tuple(
            SampleResult(
                name, position, str(position), float(right), f"The answer is {position}.", False, ((position,),)
            )
            for name in OBJECTIVES
            for position, right in enumerate(self._rng.random(self._size.num_holdout) < trial.values[name])
        )
        evidence = Evidence(digest, "0" * 64, prompts, digest[:16], "replica-0", trial.number, "vllm, bfloat16")
        return ScoreResult(samples, evidence, {"score": 3.0, "swap": 0.03})

    def _made_up_texts(self, start: int, stop: int) -> bytes:
        tokens = self._rng.integers(1000, 120_000, (stop - start, 4)).tolist()
        return pack_texts(
            [
                SampleResult("", position, "", 0.0, f"The answer is {own[0]}.", False, (tuple(own),))
                for position, own in enumerate(tokens, start=start)
            ]
        )

    def trials(self) -> Iterator[dict[str, list[dict[str, Any]]]]:
        number = 0
        for model in FINGERPRINTS:
            label, whole = ("base" if model == "base" else f"expert:{model}"), self._of_model(model)
            yield self._trial(number, Origin.SOURCE, label, whole, None)
            number += 1
        for label in LABELS:
            yield self._trial(number, Origin.PUBLISHED, label, self._layerwise(self._draw())[0], None)
            number += 1
        for _ in range(self._size.num_trials):
            recipe, configuration = self._layerwise(self._draw())
            yield self._trial(number, Origin.SEARCH, f"trial {number}", recipe, configuration)
            number += 1

    def _draw(self) -> NDArray[np.float64]:
        """Draw coefficients [num_layers, component, expert]."""
        return self._rng.uniform(-0.5, 1.5, (self._size.num_layers, len(COMPONENTS), len(EXPERTS)))

    def _of_model(self, model: str) -> Recipe:
        num_layers = self._size.num_layers
        return Recipe.of_model(model, models=FINGERPRINTS, base="base", num_layers=num_layers)

    def _layerwise(self, values: NDArray[np.float64]) -> tuple[Recipe, dict[str, float]]:
        configuration = {
            f"layers.{layer}.{component}.{expert}": round(float(values[layer, i, j]), 6)
            for layer in range(self._size.num_layers)
            for i, component in enumerate(COMPONENTS)
            for j, expert in enumerate(EXPERTS)
        }

        def merge(layer: int | None, component: str) -> Merge:
            own = tuple(configuration[f"layers.{layer or 0}.{component}.{expert}"] for expert in EXPERTS)
            return Merge("task_arithmetic", tuple(Source(expert, layer) for expert in EXPERTS), {"lambda": own})

        layers = tuple(
            LayerRecipe(merge(layer, "attention"), merge(layer, "mlp"), merge(layer, "norm"))
            for layer in range(self._size.num_layers)
        )
        return Recipe(FINGERPRINTS, "base", layers, merge(None, "attention"), merge(None, "mlp")), configuration

    def _trial(
        self, number: int, origin: Origin, label: str, recipe: Recipe, configuration: dict[str, float] | None
    ) -> dict[str, list[dict[str, Any]]]:
        has_failed = origin is Origin.SEARCH and number % FAILED_EVERY == 0
        skills = self._rng.beta(8, 6, len(OBJECTIVES))
        values = self._rng.random((len(OBJECTIVES), self._size.rungs[-1])) < skills[:, np.newaxis]
        reached = self._size.rungs[: -1 if has_failed else None]
        rungs = [self._rung(number, rung, values[:, :count]) for rung, count in enumerate(reached)]
        if origin is not Origin.SEARCH:
            rungs = rungs[-1:]
        self._now += 1.0
        state = TrialState.FAIL if has_failed else TrialState.COMPLETE
        reason = "NaN in the logits of objective 'gsm8k', sample 400" if has_failed else None
        return {
            "trials": [
                {
                    "study": self._study,
                    "number": number,
                    "origin": origin.value,
                    "label": label,
                    "state": state.value,
                    "reason": reason,
                    "bracket": 0 if origin is Origin.SEARCH else None,
                    "configuration": configuration,
                    "recipe": recipe.to_json(),
                    "recipe_digest": recipe.digest,
                    "samples_scored": int(reached[-1]) * len(OBJECTIVES),
                    "samples_reused": 0,
                    "timings_s": {"ask": 0.1, "materialise": 0.2, "score": 9.0, "swap": 0.1, "wait": 0.2},
                }
            ],
            "rungs": rungs,
            "evidence": [self._evidence(number, recipe.digest, rung) for rung in range(len(reached))],
            **self._samples(recipe.digest, values, reached),
            "events": self._events(number, label, rungs, state),
        }

    def _samples(self, digest: str, values: NDArray[np.bool_], reached: Sequence[int]) -> dict[str, list[Any]]:
        """Chunks with the samples of each rung and objective, and their texts; evidence has the ids 1, 2 and so on."""
        chunks, texts = [], []
        for start, stop in itertools.pairwise((0, *reached)):
            self._num_evidence += 1
            for index, objective in enumerate(OBJECTIVES):
                key = {"study": self._study, "split": "search", "recipe_digest": digest, "objective": objective}
                of_chunk = values[index, start:stop].astype(float)
                own = {"num_samples": stop - start, "num_tokens": 4 * (stop - start), "evidence": self._num_evidence}
                documents, packed = self._documents[objective, start], pack_values(of_chunk, of_chunk < 0)
                chunks.append({**key, "start": start, **own, "documents": documents, "packed": packed})
                drawn = self._texts[start, stop][self._rng.integers(NUM_TEXTS)]
                texts.append({**key, "start": start, "packed": drawn})
        return {"sample_chunks": chunks, "sample_texts": texts}

    def _rung(self, number: int, rung: int, values: NDArray[np.bool_]) -> dict[str, Any]:
        count = values.shape[1]
        means = values.mean(axis=1).tolist()
        errors = (values.std(axis=1, ddof=1) / count**0.5).tolist()
        return {
            "study": self._study,
            "trial": number,
            "rung": rung,
            "samples": dict.fromkeys(OBJECTIVES, count),
            "values": dict(zip(OBJECTIVES, means, strict=True)),
            "standard_errors": dict(zip(OBJECTIVES, errors, strict=True)),
        }

    def _evidence(self, number: int, digest: str, rung: int) -> dict[str, Any]:
        start = 0 if rung == 0 else self._size.rungs[rung - 1]
        stop = self._size.rungs[rung]
        return {
            "id": self._num_evidence + rung + 1,
            "study": self._study,
            "trial": number,
            "recipe_digest": digest,
            "bank_fingerprint": "0" * 64,
            "prompts": {f"search {name}[{start}:{stop}]": f"{rung}{name}" for name in OBJECTIVES},
            "weights_checksum": digest[:16],
            "replica": f"replica-{number // 2000}",
            "swap_count": number,
            "engine": "vllm, bfloat16, 60 GB of sources in pinned memory",
            "timings_s": {"materialise": 0.02, "score": 0.9, "swap": 0.03, "wait": 0.01},
            "num_samples": (stop - start) * len(OBJECTIVES),
            "sample_bytes": None,
            "text_bytes": None,
            "finished_at": self._now + rung * 0.3,
            "canaries": number // 50,
        }

    def _events(self, number: int, label: str, rungs: list[dict[str, Any]], state: TrialState) -> list[dict[str, Any]]:
        found = [(EventKind.TRIAL, {"trial": number, "label": label})]
        for row in rungs:
            is_last = row is rungs[-1] and state is TrialState.COMPLETE
            payload = {"trial": number, "rung": row["rung"], "values": row["values"]}
            found.append((EventKind.RUNG, {**payload, "state": state.value if is_last else None}))
        if state is TrialState.FAIL:
            found.append((EventKind.TRIAL_STATE, {"trial": number, "state": state.value, "reason": "NaN"}))
        return [
            {"study": self._study, "time": self._now, "kind": kind.value, "payload": payload} for kind, payload in found
        ]
