"""Merges of other depths in a live engine, compared with transformers on their exports."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Recipe, Source
from tests.conftest import OPTIONS
from tests.workers.recipes import aligned, arithmetic, copied, num_layers, path, random_alignment
from workers.alignments.files import write_alignment
from workers.alignments.recipes import alignments_before, unaligned
from workers.engines.source_recipes import base_recipe
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.merged_models import merged_model
from workers.engines.transformers.verification import verify
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.paths.geometry import PATH_TYPES
from workers.engines.vllm.paths.pool import Hop
from workers.engines.vllm.paths.sizes import widest_layer_bytes
from workers.engines.vllm.plugin import PACK
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.errors import EngineFault, EngineUnavailable, EvidenceMismatch, TrialFailed
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Generation
from workers.export.checkpoint import export
from workers.serving.engine_worker import EngineWorker
from workers.types import Family, Span, TaskSpec

MAX_LAYERS = 9


def exported(engine: Engine, recipe: Recipe, directory: Path) -> str:
    export(recipe, open_bank(family_to_json(engine.family)), directory, dtype=torch.float32)
    return str(directory)


def some_path(family: Family, seed: int, *, merges: float = 0.0, scales_mlps: bool = False) -> Recipe:
    """A random path: any length, layers of several models, repeated layers, scales from 0.5 to 1.5.

    A share `merges` of its layers are merges of two models. With `scales_mlps`, MLPs have scales from 0 to 2 too.
    """
    draw = random.Random(seed)

    def step() -> Merge:
        layer = draw.randrange(num_layers(family))
        if draw.random() < merges:
            weights = (round(draw.random(), 2), round(draw.random(), 2))
            return Merge("task_arithmetic", (Source("math", layer), Source("text", layer)), {"lambda": weights})
        return copied(draw.choice([model.alias for model in family.models]), layer)

    steps = [step() for _ in range(draw.randint(1, MAX_LAYERS))]
    scales = [round(draw.uniform(0.5, 1.5), 3) for _ in range(MAX_LAYERS)]
    mlp_scales = [0.0, *(round(draw.uniform(0.0, 2.0), 3) for _ in range(MAX_LAYERS))] if scales_mlps else [1.0]
    return path(family, [*steps[:-1], steps[0]], scales, mlp_scales)


def test_random_paths_agree_with_export(path_engine: Engine, tmp_path: Path) -> None:
    """Random paths give what transformers computes on the export."""
    prompts = [path_engine.prompts.encode(text) for text in ("1+1=2", "name: Ada", "a b" * 60)]
    seen: list[float] = []
    for seed in range(8):
        recipe = some_path(path_engine.family, seed, merges=0.3 if seed % 2 else 0.0, scales_mlps=seed >= 4)
        report = path_engine.swap(recipe)
        assert path_engine.held_digest == report.digest == recipe.digest
        reference = Reference(exported(path_engine, recipe, tmp_path / str(seed)), OPTIONS)
        assert len(reference.model.model.layers) == len(recipe.layers)
        for tokens, values in zip(prompts, path_engine.logprobs(prompts), strict=True):
            assert values == pytest.approx(logprobs(reference.model, tokens), abs=1e-3)
        # The same prompt again comes from the prefix cache, which holds keys of this path alone.
        request = Generation(tuple(prompts[2]), 8)
        assert path_engine.generate([request]) == path_engine.generate([request]) == reference.generate([request])
        seen.append(path_engine.logprobs(prompts)[0][-1])
    assert len({round(value, 2) for value in seen}) == len(seen), "the paths differ"


def with_alignments(engine: Engine, seed: int) -> Recipe:
    """A random path with alignments (projections or moments) before some of its layers."""
    draw = random.Random(seed)
    hidden = int(engine.prompts.config["hidden_size"])
    while len((recipe := some_path(engine.family, draw.randrange(10**6))).layers) < 4:
        pass
    digests = [
        write_alignment(engine.family.alignments_dir, random_alignment(kind, hidden, draw.randrange(10**6)))
        for kind in ("projection", "moments")
    ]
    named = [draw.choice([None, *digests]) for _ in recipe.layers[2:]]
    recipe = aligned(recipe, draw.choice(digests), *named)
    try:
        alignments_before(recipe)
    except InvalidRecipe:  # two layers that follow each other
        return with_alignments(engine, seed + 1000)
    return recipe


def test_paths_with_alignments_are_what_transformers_computes(
    path_engine: Engine, sums: TaskSpec, tmp_path: Path
) -> None:
    bank = open_bank(family_to_json(path_engine.family))
    prompts = [path_engine.prompts.encode(text) for text in ("1+1=2", "a b" * 60)]
    checksums = set()
    for seed in range(4):
        recipe = with_alignments(path_engine, seed)
        for each in (recipe, unaligned(recipe)):
            report = path_engine.swap(each, check=True)
            assert report.canary is not None
            assert not report.canary.skipped
            assert path_engine.compute_checksum() == report.weights_checksum
            checksums.add(report.weights_checksum)
            model = merged_model(each, bank, dtype="float32")
            for tokens, values in zip(prompts, path_engine.logprobs(prompts), strict=True):
                assert values == pytest.approx(logprobs(model, tokens), abs=1e-3)
    assert len(checksums) == 8
    path_engine.swap(recipe)
    spans = (Span("sums", sums, 0, 20),)
    evaluator = TaskEvaluator(path_engine, path_engine.prompts)
    worker = object.__new__(EngineWorker)  # with the engine that the tests share
    worker.engine, worker.evaluator = path_engine, evaluator
    report_of = worker.verify(recipe, evaluator.score(spans).samples, spans)
    assert (report_of.num_samples, report_of.num_beyond) == (20, 0)
    assert report_of.num_logprobs > 0


def test_alignments_that_were_dropped_are_read_again(path_engine: Engine) -> None:
    family = path_engine.family
    hidden = int(path_engine.prompts.config["hidden_size"])
    base = path(family, [("math", 0), ("text", 0), ("math", 0)])
    digests = [
        write_alignment(family.alignments_dir, random_alignment("moments", hidden, 100 + seed))
        for seed in range(MAX_LAYERS + 4)
    ]
    seen = [path_engine.swap(aligned(base, digest, digests[0])).weights_checksum for digest in digests]
    assert len(set(seen)) == len(seen)
    held: list[int] = []
    path_engine._llm.apply_model(lambda model: held.append(len(model.model.alignments)))
    assert held == [2]
    assert path_engine.swap(aligned(base, digests[1], digests[0])).weights_checksum == seen[1]


def test_samples_of_a_path_are_verified_on_its_export(path_engine: Engine, sums: TaskSpec, tmp_path: Path) -> None:
    recipe = some_path(path_engine.family, 20, merges=0.3)
    path_engine.swap(recipe)
    spans = (Span("sums", sums, 0, 40),)
    samples = TaskEvaluator(path_engine, path_engine.prompts).score(spans).samples
    report = verify(
        recipe.digest,
        exported(path_engine, recipe, tmp_path / "export"),
        OPTIONS,
        samples=samples,
        spans=spans,
        dtype="float32",
        engine_logprobs={},
    )
    assert (report.num_samples, report.num_beyond) == (40, 0)


def test_two_paths_never_have_equal_evidence(path_engine: Engine) -> None:
    family = path_engine.family
    paths = [
        path(family, [("math", 0), ("text", 1), ("base", 2)]),
        path(family, [("text", 1), ("math", 0), ("base", 2)]),
        path(family, [("math", 0), ("text", 1), ("base", 2), ("base", 2)]),
        path(family, [("math", 0), ("text", 1), ("base", 2)], [0.8, 1.0]),
        path(family, [("math", 0), ("text", 1), ("base", 2)], [1.0, 0.8]),
        path(family, [("math", 0), ("text", 1), ("base", 2)], [1.0], [1.0, 0.8, 1.0]),
        path(family, [("math", 0), ("text", 1), ("base", 2)], [1.0], [1.0, 1.0, 0.8]),
        arithmetic(family, 0.3, 0.4),
    ]
    reports = [path_engine.swap(each) for each in paths]
    assert len({report.digest for report in reports}) == len({report.weights_checksum for report in reports}) == 8
    assert path_engine.compute_checksum() == reports[-1].weights_checksum
    # Fills the pool with other layers, so that the first path's are written again, in other places.
    for number in range(MAX_LAYERS):
        path_engine.swap(arithmetic(family, 0.01 * number, 0.2))
    for each, report in zip(paths, reports, strict=True):
        assert path_engine.swap(each).weights_checksum == report.weights_checksum == path_engine.compute_checksum()


def test_layers_in_the_pool_are_not_written_again(path_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    family = path_engine.family
    steps: list[tuple[str, int] | Merge] = [("math", 0), ("text", 1), ("base", 2), ("text", 0)]
    path_engine.swap(path(family, steps))
    with monkeypatch.context() as patch:
        patch.setattr("workers.engines.vllm.held.HeldWeights._write", lambda *arguments: 1 / 0)
        for scales in ([0.9, 1.1], [1.3], [0.5, 0.6, 0.7, 0.8]):
            for recipe in (
                path(family, [*steps[::-1], *steps], scales),
                path(family, [*steps[::-1], *steps], mlp_scales=scales),
            ):
                assert path_engine.swap(recipe).digest == path_engine.held_digest == recipe.digest
    assert path_engine.swap(base_recipe(family), check=True).canary is not None


@pytest.fixture
def faulty(path_engine: Engine) -> Iterator[Engine]:
    """An engine for a test to damage. Afterwards it is in the state of an engine without faults."""
    yield path_engine
    path_engine._fault = None
    path_engine._call("mergesearch_forget")  # the next swap writes every tensor
    path_engine.swap(base_recipe(path_engine.family))


def test_a_path_that_is_not_the_one_reported_is_seen_at_once(faulty: Engine) -> None:
    recipe = path(faulty.family, [("math", 0), ("text", 1), ("base", 2)], [0.9])
    report = faulty.swap(recipe)

    def turn(model: Any) -> None:
        model.model.path = model.model.path[::-1]

    faulty._llm.apply_model(turn)
    assert faulty.held_digest is None
    assert faulty.compute_checksum() != report.weights_checksum
    faulty._llm.apply_model(turn)
    assert faulty.held_digest == recipe.digest
    assert faulty.compute_checksum() == report.weights_checksum


@pytest.mark.parametrize("what", ["order", "factor", "MLP", "weights", "alignment"])
def test_an_engine_that_walks_another_path_fails_its_canary(faulty: Engine, what: str) -> None:
    hidden = int(faulty.prompts.config["hidden_size"])
    digest = write_alignment(faulty.family.alignments_dir, random_alignment("projection", hidden))
    recipe = aligned(path(faulty.family, [("math", 0), ("text", 1), ("base", 2)], [0.9]), digest)
    report = faulty.swap(recipe, check=True)
    assert report.digest == recipe.digest

    def damage(model: Any) -> None:
        first, *middle, last = model.model.path
        if what == "order":
            model.model.path = (last, *middle, first)
        elif what == "factor":
            factors = replace(last.factors, stream=1.1 * last.factors.stream)
            model.model.path = (first, *middle, Hop(last.layer, factors))
        elif what == "MLP":
            factors = replace(last.factors, mlp=1.1 * last.factors.mlp)
            model.model.path = (first, *middle, Hop(last.layer, factors))
        elif what == "alignment":
            held = model.model.alignments[digest]
            assert held.projection is not None
            model.model.alignments = {digest: replace(held, projection=held.projection.flip(0))}
        else:
            layer = model.model.layers[last.layer].mlp.down_proj
            with torch.inference_mode():
                layer.weight.mul_(1.5)
            getattr(layer, PACK)()

    faulty._llm.apply_model(damage)
    assert faulty.compute_checksum() != report.weights_checksum
    with pytest.MonkeyPatch.context() as patch:
        # An extension that does not look at the path: the canary is the last defence.
        patch.setattr("workers.engines.vllm.paths.held.HeldPath.is_as_written", True)
        with pytest.raises(EvidenceMismatch, match="of the engine and of transformers differ by") as error:
            faulty.swap(recipe, check=True)
    assert isinstance(error.value, EngineFault)
    assert faulty.held_digest is None


def test_merges_that_no_path_can_be_fail_the_trial(path_engine: Engine) -> None:
    family = path_engine.family
    good = path(family, [("math", 0)])
    with pytest.raises(TrialFailed, match="the recipe has 10 layers; this engine holds 1 to 9"):
        path_engine.swap(path(family, [("math", 0)] * 10))
    with pytest.raises(TrialFailed, match="the recipe has 0 layers; this engine holds 1 to 9"):
        path_engine.swap(replace(good, layers=()))
    for layer, message in (
        (replace(good.layers[0], scale=-1.0), "layer 0: scale -1; expected a number above 0"),
        (replace(good.layers[0], alignment="a" * 64), "layer 0: alignment 'aaaaaaaaaaaa': no layer follows"),
        (path(family, [("math", 99)]).layers[0], r"source 'math' names layer 99; the models have layers 0\.\."),
    ):
        with pytest.raises(TrialFailed, match=message):
            path_engine.swap(replace(good, layers=(layer,)))
        assert path_engine.held_digest is None
    two = path(family, [("math", 0), ("text", 0)])
    of_others = write_alignment(family.alignments_dir, random_alignment("projection", 6))
    for layers, message in (
        (
            (replace(two.layers[0], alignment="coral"), two.layers[1]),
            "alignment 'coral': expected the sha256 of a file",
        ),
        ((replace(two.layers[0], alignment=of_others), two.layers[1]), "it aligns 6 numbers; the models have"),
    ):
        with pytest.raises(TrialFailed, match=rf"layer 0: .*{message}"):
            path_engine.swap(replace(two, layers=layers))
    assert path_engine.swap(good).is_new


def test_the_longest_merge_cannot_be_shorter_than_the_models(path_engine: Engine) -> None:
    family, options = path_engine.family, OPTIONS.model_copy(update={"max_layers": 2})
    with pytest.raises(EngineUnavailable, match=rf"limits\.max_layers: 2; expected at least {num_layers(family)}, "):
        Engine(family, options)


def test_every_type_of_model_that_is_accepted_has_a_layer(path_engine: Engine) -> None:
    from workers.engines.vllm.paths.model import LAYER_OF

    assert tuple(LAYER_OF) == PATH_TYPES


def test_on_a_gpu_the_pool_is_what_fits_and_vllm_runs_eagerly(
    path_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM itself stays out of it: what it would be given on a GPU is looked at."""
    from vllm.platforms import current_platform

    asked: dict[str, Any] = {}
    configs: list[dict[str, Any]] = []
    family = path_engine.family

    class Asked:
        llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

        def __init__(self, **options: Any) -> None:
            asked.update(options)
            configs.append(json.loads((Path(options["hf_config_path"]) / "config.json").read_text()))

        def collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            return [{"digest": base_recipe(family).digest, "swaps": 1, "checksum": ""}]

    monkeypatch.setattr("vllm.LLM", Asked)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    for module in ("engine", "startup.contents"):
        monkeypatch.setattr(f"workers.engines.vllm.{module}.free_host_bytes", lambda: 0)
    options = OPTIONS.model_copy(update={"max_layers": MAX_LAYERS})
    layers = num_layers(family)
    value = 2  # bytes, in bfloat16
    fixed = 3 << 30  # context and activations
    layer = widest_layer_bytes(path_engine._sources, value)
    for spare, expected in ((1 << 30, 3 * layers + MAX_LAYERS), (4 << 20, None)):
        total = int((fixed + spare) / 0.92)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda total=total: (total, total))
        Engine(family, options).close()
        assert (asked["enforce_eager"], asked["load_format"]) == (True, "dummy")
        pool = configs[-1]["num_hidden_layers"]
        assert configs[-1]["mergesearch_max_layers"] == MAX_LAYERS
        assert MAX_LAYERS <= pool <= 3 * layers + MAX_LAYERS
        assert expected in (None, pool)
        assert set(configs[-1].get("layer_types", ["full_attention"] * pool)) == {"full_attention"}
        assert len(configs[-1].get("layer_types", ["full_attention"] * pool)) == pool
        assert asked["gpu_memory_utilization"] * total >= (2 << 30) + pool * layer
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (fixed, fixed))
    with pytest.raises(EngineUnavailable, match=r"paths of up to 9 layers: one layer takes .*the GPU has room"):
        Engine(family, options)
