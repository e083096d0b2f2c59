import itertools
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.recipe import Merge, Recipe, Source
from tests.conftest import OPTIONS
from tests.workers.recipes import arithmetic, slerp
from workers.engines.source_recipes import base_recipe
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.verification import verify
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.plugin import PACK
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.errors import EngineFault, EngineUnavailable, EvidenceMismatch, TrialFailed
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Completion, Continuation, Generation
from workers.export.checkpoint import export
from workers.types import CanaryReport, Family, Span, TaskSpec


def exported(engine: Engine, recipe: Recipe, directory: Path) -> str:
    export(recipe, open_bank(family_to_json(engine.family)), directory, dtype=torch.float32)
    return str(directory)


def test_engine_starts_with_the_base_model_in_float32(engine: Engine, untied_family: Family) -> None:
    assert engine.dtype == "float32"
    engine.swap(base_recipe(untied_family))
    reference = Reference(untied_family.base.directory, OPTIONS)
    tokens = engine.prompts.encode("12+30=42 and so on")
    assert engine.logprobs([tokens])[0] == pytest.approx(logprobs(reference.model, tokens), abs=1e-3)


def test_logprobs_after_a_swap(engine: Engine, untied_family: Family, tmp_path: Path) -> None:
    """Log-probabilities after a swap are those of transformers on the export."""
    recipes = [arithmetic(untied_family, 0.4, 0.9), slerp(untied_family, 0.3), arithmetic(untied_family, 0.0, 1.0)]
    prompts = [engine.prompts.encode(text) for text in ("1+1=2", "name: Ada", "z" * 200)]
    seen = []
    for number, recipe in enumerate(recipes):
        report = engine.swap(recipe)
        assert engine.held_digest == report.digest == recipe.digest
        reference = Reference(exported(engine, recipe, tmp_path / str(number)), OPTIONS)
        ours = engine.logprobs(prompts)
        for tokens, values in zip(prompts, ours, strict=True):
            assert values == pytest.approx(logprobs(reference.model, tokens), abs=1e-3)
        seen.append(ours[1][-1])
    assert min(abs(a - b) for a, b in itertools.pairwise(seen)) > 0.01, "the recipes differ"


def test_swap_to_the_held_recipe(engine: Engine, untied_family: Family) -> None:
    """A swap to the held recipe does nothing, and equal recipes give equal parameters."""
    first = engine.swap(arithmetic(untied_family, 0.5, 0.5))
    again = engine.swap(arithmetic(untied_family, 0.5, 0.5))
    assert (again.is_new, again.swap_count, again.swap_s) == (False, first.swap_count, 0.0)
    other = engine.swap(arithmetic(untied_family, 0.5, 0.50001))
    back = engine.swap(arithmetic(untied_family, 0.5, 0.5))
    assert back.swap_count == first.swap_count + 2
    assert back.weights_checksum == first.weights_checksum != other.weights_checksum
    assert engine.compute_checksum() == back.weights_checksum


def test_exported_tensors_are_bit_for_bit_what_the_engine_holds(
    engine: Engine, untied_family: Family, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    recipe = slerp(untied_family, 0.37)
    engine.swap(recipe)
    directory = Path(exported(engine, recipe, tmp_path / "export"))
    files = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    (held,) = engine._llm.apply_model(lambda model: {n: p.clone() for n, p in model.named_parameters()})
    for name, parameter in held.items():
        parts = [name]
        for fused, of in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if fused in name:
                parts = [name.replace(fused, part) for part in of]
        written = torch.cat([files.pop(part) for part in parts])
        assert torch.equal(parameter[: len(written)], written), name
    assert not files


def test_cached_prefixes_do_not_outlive_a_swap(engine: Engine, untied_family: Family, tmp_path: Path) -> None:
    request = Generation(tuple(engine.prompts.encode("a b" * 60)), 16)  # longer than a cache block: it would be reused
    completions = []
    for weight in (0.2, 1.5):
        recipe = arithmetic(untied_family, weight, 0.1)
        engine.swap(recipe)
        completions.append(engine.generate([request])[0])
    assert [completions[1]] == Reference(exported(engine, recipe, tmp_path / "b"), OPTIONS).generate([request])
    assert completions[0].text != completions[1].text


def options_of_questions(engine: Engine) -> list[Continuation]:
    """Options of one or more tokens, after prompts shorter and longer than a cache block. Some are the likeliest."""
    draw = random.Random(7)
    shots = (1, *draw.choices(range(4, 99), k=150))
    contexts = [(*shots, *draw.choices(range(4, 99), k=9), question) for question in (3, 4)] + [shots[:20]]
    likeliest = [c.tokens for c in engine.generate([Generation(context, 3) for context in contexts])]
    tails = [(30,), (31,), (32,), (33,), (40, 41, 42, 43), (40, 41, 42, 44, 45), (40, 41), (46,) * 40]
    return [Continuation(c + t, len(c)) for c, best in zip(contexts, likeliest, strict=True) for t in (*tails, best)]


def test_options_have_the_scores_of_transformers(engine: Engine, untied_family: Family, tmp_path: Path) -> None:
    """The log-likelihood of every option is that of plain transformers, after a swap and when the cache has it all."""
    for number, recipe in enumerate((arithmetic(untied_family, 0.7, 0.2), slerp(untied_family, 0.6))):
        engine.swap(recipe)
        options = options_of_questions(engine)
        expected = Reference(exported(engine, recipe, tmp_path / str(number)), OPTIONS).loglikelihoods(options)
        assert {is_likeliest for _, is_likeliest in expected} == {True, False}
        for _ in range(2):
            found = engine.loglikelihoods(options)
            assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
            assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]


def test_a_question_with_letters_is_one_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four options of one token take one prompt, whose beginning the cache has from the question before."""
    read: list[Any] = []
    run = engine._run

    def watched(prompts: Sequence[Sequence[int]], parameters: list[Any]) -> list[Any]:
        outputs = run(prompts, parameters)
        read.extend(zip(prompts, parameters, outputs, strict=True))
        return outputs

    monkeypatch.setattr(engine, "_run", watched)
    assert engine._llm.reset_prefix_cache()
    shots = tuple(range(4, 99)) + tuple(range(4, 99))
    questions = [(*shots, question) for question in range(10, 14)]
    engine.loglikelihoods([Continuation((*q, letter), len(q)) for q in questions for letter in (30, 31, 32, 33)])
    assert sorted(prompt for prompt, _, _ in read) == questions
    assert all(parameters.prompt_logprobs is None for _, parameters, _ in read)
    whole_blocks = len(shots) // engine._cache_block * engine._cache_block
    assert whole_blocks >= 128
    assert [output.num_cached_tokens for _, _, output in read] == [0, *[whole_blocks] * 3]


class CachingVLLM:
    """A made-up model of three tokens in the place of vLLM, with a prefix cache of blocks of four tokens.

    The model has no rows for cached tokens: vLLM's model runners either omit these rows or return uninitialised memory.
    """

    def __init__(self, *, leaves_out: bool) -> None:
        self.leaves_out = leaves_out
        self.num_prompts: list[int] = []
        self.cache: set[tuple[int, ...]] = set()
        config = SimpleNamespace(block_size=4, enable_prefix_caching=True)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=config))

    def run(self, prompts: Sequence[Sequence[int]], parameters: list[Any]) -> list[Any]:
        self.num_prompts.append(len(prompts))
        return [self.answer(list(prompt), each) for prompt, each in zip(prompts, parameters, strict=True)]

    def answer(self, prompt: list[int], parameters: Any) -> Any:
        ends = range(0 if parameters.skip_reading_prefix_cache else (len(prompt) - 1) // 4 * 4, 0, -4)
        num_cached = next((end for end in ends if tuple(prompt[:end]) in self.cache), 0)
        self.cache |= {tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)}
        rows = [made_up(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
        rows[:num_cached] = [] if self.leaves_out else [(-9e9, False)] * num_cached
        after = [sum(prompt) % 3, *parameters.logprob_token_ids]
        return SimpleNamespace(
            num_cached_tokens=num_cached,
            prompt_logprobs=flat([value for value, _ in rows], [1 if likeliest else 2 for _, likeliest in rows]),
            outputs=[SimpleNamespace(logprobs=flat([made_up(prompt, t)[0] for t in after], [1] * len(after), after))],
        )


def made_up(before: Sequence[int], token: int) -> tuple[float, bool]:
    """Log-probability of a token after the tokens `before`, and whether it is the likeliest."""
    return -float(hash((*before, token)) % 1000), sum(before) % 3 == token


def flat(logprobs: list[float], ranks: list[int], token_ids: Sequence[int] = ()) -> Any:
    return SimpleNamespace(logprobs=logprobs, ranks=ranks, token_ids=token_ids)


@pytest.mark.parametrize("leaves_out", [False, True])
def test_rows_that_the_cache_hides_are_read_again(leaves_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens whose rows are missing, because the cache has them already, are read without the cache."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine = Engine.__new__(Engine)
    engine._llm = CachingVLLM(leaves_out=leaves_out)
    monkeypatch.setattr(engine, "_run", engine._llm.run)
    draw = random.Random(0)
    contexts = [tuple(draw.choices(range(3), k=length)) for length in (3, 8, 11, 13)]
    options = [Continuation(c + tuple(draw.choices(range(3), k=k)), len(c)) for c in contexts for k in (1, 2, 3, 12)]
    options.append(Continuation((2,) * 14, 11))  # the cache ends where its rows begin
    expected = [[made_up(o.tokens[:i], o.tokens[i]) for i in range(o.num_context, len(o.tokens))] for o in options]
    for num_runs in (1, 2):
        engine._llm.num_prompts.clear()
        scores = engine.loglikelihoods(options)
        assert scores == [(sum(v for v, _ in tokens), all(best for _, best in tokens)) for tokens in expected]
        assert len(engine._llm.num_prompts) == num_runs
        assert engine._llm.num_prompts[-1] <= engine._llm.num_prompts[0]


def test_rows_of_logits_are_bounded(engine: Engine, untied_family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of a long text come from few rows of logits at a time."""
    engine.swap(base_recipe(untied_family))
    text = tuple(random.Random(3).choices(range(4, 99), k=250))
    (expected,) = engine.logprobs([text])
    rows: list[int] = []
    (model,) = engine._llm.apply_model(lambda model: model)
    compute_logits = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute_logits(hidden))
    engine.logprobs([text])
    assert max(rows) == 248
    monkeypatch.setattr("workers.engines.vllm.readings.MAX_ROWS", 16)
    assert engine._llm.reset_prefix_cache()  # what the cache has already is read again, with all rows before it
    rows.clear()
    (found,) = engine.logprobs([text])
    assert max(rows) <= engine._cache_block + 16
    assert found == pytest.approx(expected, abs=1e-4)


def generations(engine: Engine) -> list[Generation]:
    """Twelve requests of different lengths, of which two are equal."""
    prompts = [engine.prompts.encode("ab" * (1 + index % 5)) for index in range(11)]
    requests = [Generation(tuple(p), max_tokens=4 + 11 * (index % 4)) for index, p in enumerate(prompts)]
    return [*requests, requests[3]]


def test_completions_are_handed_on_as_they_finish(engine: Engine) -> None:
    """Each completion is handed on once, with its request's number, before all are there: short ones first."""
    engine.swap(base_recipe(engine.family))
    requests = generations(engine)
    seen: list[tuple[int, Completion]] = []
    found = engine.generate(requests, finished=lambda index, completion: seen.append((index, completion)))
    assert sorted(seen, key=lambda each: each[0]) == list(enumerate(found))
    assert found[11] == found[3]
    lengths = [len(completion.tokens) for _, completion in seen]
    assert lengths[0] < lengths[-1]
    assert engine.generate(requests) == found


def test_failure_while_completions_finish_leaves_no_request(engine: Engine) -> None:
    """After an error in the middle, the engine has no requests left, and scores the next ones as before."""
    engine.swap(base_recipe(engine.family))
    requests = generations(engine)
    found = engine.generate(requests)

    def fail(index: int, completion: Completion) -> None:
        raise TrialFailed("no room for programs")

    with pytest.raises(TrialFailed, match="no room for programs"):
        engine.generate(requests, finished=fail)
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine.generate(requests) == found


def test_samples_agree_with_export(
    engine: Engine, untied_family: Family, sums: TaskSpec, choices: TaskSpec, tmp_path: Path
) -> None:
    """Stored samples are those that transformers gives on the export."""
    recipe = arithmetic(untied_family, 0.6, 0.3)
    engine.swap(recipe)
    evaluation = TaskEvaluator(engine, engine.prompts)
    said = {sample.document: sample.response for sample in evaluation.score([Span("x", sums, 0, 400)]).samples}
    # Half of the answers are what this model says, so that the metric depends on every token of them.
    rows = [{"prompt": f"{i}+{i + 3}=", "answer": said[str(i)] + ("" if i % 2 else "!")} for i in range(400)]
    (tmp_path / "said.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said_task = TaskSpec({"file": str(tmp_path / "said.jsonl"), "max_tokens": 6}, "exact_match")
    spans = (Span("said", said_task, 0, 400), Span("choices", choices, 0, 12))
    samples = evaluation.score(spans).samples
    assert 190 <= sum(sample.value for sample in samples if sample.objective == "said") <= 210
    report = verify(
        recipe.digest,
        exported(engine, recipe, tmp_path / "export"),
        OPTIONS,
        samples=samples,
        spans=spans,
        dtype="float32",
        engine_logprobs={},
    )
    assert report.num_samples == 412
    assert report.num_equal >= 0.995 * 412
    assert report.num_beyond == 0
    assert report.num_without_tokens == 0


def test_candidate_with_nan_logits_fails_and_leaves_no_trace(
    engine: Engine, untied_family: Family, sums: TaskSpec
) -> None:
    evaluation = TaskEvaluator(engine, engine.prompts)
    spans = (Span("x", sums, 0, 300),)
    good = arithmetic(untied_family, 0.6, 0.3)
    engine.swap(good)
    before = evaluation.score(spans)
    engine.swap(arithmetic(untied_family, 1e40, 1e40))
    for _ in range(2):
        with pytest.raises(TrialFailed, match=r"logits are NaN \(\d+ rows in 300 prompts\)"):
            evaluation.score(spans)
    engine.swap(good)
    assert evaluation.score(spans) == before


def test_infinite_logits_fail_a_candidate_and_masked_ones_do_not(
    engine: Engine, untied_family: Family, sums: TaskSpec, choices: TaskSpec
) -> None:
    evaluation = TaskEvaluator(engine, engine.prompts)
    engine.swap(base_recipe(untied_family))
    spans = ((Span("x", sums, 0, 20),), (Span("x", choices, 0, 4),))
    before = [evaluation.score(each) for each in spans]

    @contextmanager
    def first_token(value: float) -> Iterator[None]:
        """Context in which token 0, the padding, has this logit; no prompt contains it."""

        def change(module: Any, arguments: Any, logits: torch.Tensor) -> None:
            logits[..., 0] = value

        (hook,) = engine._llm.apply_model(lambda model: model.logits_processor.register_forward_hook(change))
        yield
        hook.remove()

    with first_token(-float("inf")):
        assert [len(evaluation.score(each).samples) for each in spans] == [20, 4]
    with first_token(float("inf")):
        for each in spans:
            with pytest.raises(TrialFailed, match=r"logits are infinite \(\d+ rows in \d+ prompts\)"):
                evaluation.score(each)
    assert [evaluation.score(each) for each in spans] == before


def test_engine_that_does_not_hold_what_it_says_is_caught(engine: Engine, untied_family: Family) -> None:
    engine.swap(arithmetic(untied_family, 0.3, 0.3))
    assert (engine.check_against_transformers(arithmetic(untied_family, 0.3, 0.3)) or 1.0) < 1e-3
    with pytest.raises(EvidenceMismatch, match="log-probabilities of the engine and of transformers differ by"):
        engine.check_against_transformers(arithmetic(untied_family, 0.3, 0.5))


@pytest.fixture
def faulty(engine: Engine) -> Iterator[Engine]:
    """An engine for a test to damage. Afterwards it is in the state of an engine without faults."""
    yield engine
    engine._fault = None
    engine._call("mergesearch_forget")  # the next swap writes every tensor
    engine.swap(base_recipe(engine.family))


def damage(model: Any) -> None:
    """Change the weights of one layer behind the engine's back."""
    layer = model.model.layers[1].mlp.down_proj
    with torch.inference_mode():
        layer.weight.mul_(1.5)
    getattr(layer, PACK)()


def test_failed_canary_refuses_everything(faulty: Engine, untied_family: Family) -> None:
    """An engine that fails its canary holds nothing and refuses every request."""
    recipe, other = arithmetic(untied_family, 0.3, 0.3), slerp(untied_family, 0.4)
    assert faulty.swap(recipe, check=True).digest == recipe.digest
    faulty._llm.apply_model(damage)
    with pytest.raises(
        EvidenceMismatch, match="log-probabilities of the engine and of transformers differ by"
    ) as caught:
        faulty.swap(recipe, check=True)
    assert faulty.held_digest is None
    for refused in (lambda: faulty.swap(recipe), lambda: faulty.swap(other), lambda: faulty.logprobs([[1, 2, 3]])):
        with pytest.raises(EvidenceMismatch, match="differ by"):
            refused()
    assert isinstance(caught.value, EngineFault)
    assert (caught.value.replica, caught.value.canaries) == (faulty.name, faulty.canary.num_passed)
    with pytest.raises(EngineFault):
        faulty.check()


def test_a_check_makes_a_canary_only_after_something_was_scored(engine: Engine, untied_family: Family) -> None:
    engine.swap(arithmetic(untied_family, 0.3, 0.3), check=True)
    passed = engine.canary.num_passed
    assert engine.check().canaries == passed
    engine.generate([Generation((1, 5, 6), 2)])
    assert engine.check() == CanaryReport(engine.name, passed + 1)
    assert engine.check().canaries == passed + 1


def test_a_canary_that_cannot_be_made_is_not_a_canary_passed(
    engine: Engine, untied_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, nan = arithmetic(untied_family, 0.3, 0.3), arithmetic(untied_family, 1e40, 1e40)
    passed, skipped = engine.canary.num_passed, engine.canary.num_skipped
    found = engine.swap(nan, check=True).canary
    assert found is not None
    assert (found.canaries, "logits are NaN" in found.skipped) == (passed, True)
    assert engine.check() == CanaryReport(engine.name, passed + 1), "on the base model instead"
    with monkeypatch.context() as patch:
        patch.setattr("workers.engines.vllm.engine.free_host_bytes", lambda: 0)
        found = engine.swap(recipe, check=True).canary
        assert found is not None
        assert (found.canaries, "GiB more memory than is free" in found.skipped) == (passed + 1, True)
    assert engine.canary.num_skipped == skipped + 3, "twice for NaN, once for memory"
    assert engine.swap(recipe, check=True).canary == CanaryReport(engine.name, passed + 2)


def test_a_layer_that_is_not_packed_again_fails_the_swap(faulty: Engine, untied_family: Family) -> None:
    faulty.swap(arithmetic(untied_family, 0.3, 0.3))
    (layer,) = faulty._llm.apply_model(lambda model: model.model.layers[3].self_attn.qkv_proj)
    pack = getattr(layer, PACK)
    setattr(layer, PACK, lambda: None)
    try:
        with pytest.raises(
            EvidenceMismatch, match=r"packed weights of model\.layers\.3\.self_attn\.qkv_proj differ from the merge"
        ):
            faulty.swap(arithmetic(untied_family, 0.3001, 0.3))
        assert faulty.held_digest is None
    finally:
        setattr(layer, PACK, pack)


def test_failed_merge_holds_nothing(engine: Engine, untied_family: Family) -> None:
    """A merge that cannot be computed fails the trial, and the engine holds nothing."""
    with pytest.raises(TrialFailed, match="the recipe has 3 layers, the model 5"):
        engine.swap(arithmetic(untied_family, 0.3, 0.3, layers=3))
    good = arithmetic(untied_family, 0.3, 0.3)
    with pytest.raises(TrialFailed, match="the merge cannot be computed"):
        engine.swap(replace(good, head=Merge("passthrough", (Source("math", 3),))))
    assert engine.held_digest is None
    assert engine.swap(good).is_new


@pytest.mark.heavy
def test_start_that_fails_says_why_and_where_the_log_is(tmp_path: Path, untied_family: Family) -> None:
    models = []
    for model in untied_family.models:  # five heads do not divide the hidden size, which nothing but vLLM checks
        directory = shutil.copytree(model.directory, tmp_path / model.alias)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
        models.append(replace(model, directory=str(directory)))
    family = replace(untied_family, base=models[0], experts=tuple(models[1:]))
    with pytest.raises(EngineUnavailable, match=r"vLLM did not start for .*base: .*; its log is /logs/out") as caught:
        Engine(family, OPTIONS, log_file="/logs/out")
    assert caught.value.__cause__ is not None


def test_gpu_memory_is_shared(engine: Engine, untied_family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, vLLM receives its share of memory and the bank its placements.

    vLLM itself stays out of it: what it would be given on a GPU is looked at.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    asked: dict[str, Any] = {}

    class Asked:
        llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

        def __init__(self, **options: Any) -> None:
            asked.update(options)

        def collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            asked[method] = (*args, kwargs)
            return [{"digest": base_recipe(untied_family).digest, "swaps": 1, "checksum": ""}]

    monkeypatch.setattr("vllm.LLM", Asked)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79 * 10**9, 80 * 10**9))
    for module in ("engine", "startup.contents"):  # nor is there memory for a second model
        monkeypatch.setattr(f"workers.engines.vllm.{module}.free_host_bytes", lambda: 0)
    Engine(untied_family, OPTIONS.model_copy(update={"rank_cache": True})).close()
    family, opening = asked.pop("mergesearch_open")
    assert (family, opening["placements"]) == (family_to_json(untied_family), ("gpu", "mapped"))
    assert 0 < opening["scratch_bytes"] < 10**6
    assert "GB of the GPU's 80.0 GB for keys and values" in opening["reason"]
    assert opening["keeps_ranks"]
    options = {name: value for name, value in asked.items() if not name.startswith("mergesearch_")}
    found = EngineArgs(**options)
    assert found.gpu_memory_utilization == pytest.approx(0.9199, abs=1e-4)
    assert (found.dtype, found.moe_backend, found.enforce_eager) == ("bfloat16", "triton", False)
    assert found.kv_cache_memory_bytes is None
