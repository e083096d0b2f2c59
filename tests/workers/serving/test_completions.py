"""Completions by a real replica: equal to those of plain transformers, streamed, and during a search's scoring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.workers.recipes import arithmetic
from workers.engines.source_recipes import base_recipe
from workers.errors import EngineBusy, InvalidPrompt
from workers.serving.completions import CompletionPart, CompletionRequest
from workers.serving.serve_completer import ServeCompleter
from workers.serving.serve_scorer import ServeScorer
from workers.types import Family, ScoreRequest, Span, TaskSpec

PROMPT = "1+2="


def completed(scorer: ServeScorer, *requests: CompletionRequest) -> list[list[CompletionPart]]:
    """The parts of each completion; all are requested at the same time."""

    async def parts(request: CompletionRequest) -> list[CompletionPart]:
        return [part async for part in ServeCompleter(scorer.app_name).complete(request)]

    async def every() -> list[list[CompletionPart]]:
        return list(await asyncio.gather(*map(parts, requests)))

    return asyncio.run(every())


def text(parts: Sequence[CompletionPart]) -> str:
    return "".join(part.text for part in parts)


def greedy(family: Family, weight: float, **options: object) -> CompletionRequest:
    defaults = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "yields": False}
    return CompletionRequest(arithmetic(family, weight, 0.1), **{**defaults, **options})  # type: ignore[arg-type]


def test_greedy_text_is_that_of_the_exported_model(scorer: ServeScorer, tied_family: Family, tmp_path: Path) -> None:
    """A greedy completion has the text that plain transformers generates with the exported merge, part by part."""
    import torch
    from transformers import AutoModelForCausalLM

    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.worker_extension import family_to_json, open_bank
    from workers.evaluation.prompts import Prompts
    from workers.export.checkpoint import export

    requests = [greedy(tied_family, weight) for weight in (0.2, 1.4)]
    found = completed(scorer, *requests)
    for request, parts in zip(requests, found, strict=True):
        out = export(
            request.recipe,
            open_bank(family_to_json(tied_family)),
            tmp_path / request.recipe.digest[:8],
            dtype=torch.float32,
        )
        prompts = Prompts(str(out), EngineOptions())
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        ids = prompts.encode(PROMPT)
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=list(prompts.stop_token_ids) or None
        )[0].tolist()
        expected = prompts.tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
        assert text(parts) == expected
        assert {part.recipe_digest for part in parts} == {request.recipe.digest}
        assert len(parts) > 1, "the text was streamed"
        assert sum(part.num_tokens for part in parts) <= 12
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason in ("stop", "length")


def test_completions_do_not_change_scores(scorer: ServeScorer, tied_family: Family, sums: TaskSpec) -> None:
    """Samples that are scored beside completions of other merges have the values and the evidence of quiet ones."""
    requests = [
        ScoreRequest("study", arithmetic(tied_family, weight, 0.1), (Span("x", sums, 0, 40),))
        for weight in (0.1, 0.4, 0.8, 1.2)
    ]
    quiet = [scorer.score(request) for request in requests]
    with ThreadPoolExecutor(1) as pool:
        chats = pool.submit(completed, scorer, *(greedy(tied_family, w, max_tokens=40) for w in (0.3, 0.6)))
        results = [scorer.score(request) for request in requests]
        chats.result()
    for before, after in zip(quiet, results, strict=True):
        assert before.samples == after.samples
        assert before.evidence.weights_checksum == after.evidence.weights_checksum


def test_a_search_ends_completions_that_yield(scorer: ServeScorer, tied_family: Family, sums: TaskSpec) -> None:
    """A completion that yields ends before the next step of the engine when a chunk of a search arrives."""
    long = greedy(tied_family, 0.3, max_tokens=None, yields=True, stop=())

    async def interrupted() -> None:
        parts = ServeCompleter(scorer.app_name).complete(long)
        first = await anext(parts)
        assert first.finish_reason is None
        scoring = asyncio.create_task(
            asyncio.to_thread(
                scorer.score, ScoreRequest("study", base_recipe(tied_family).canonical(), (Span("x", sums, 0, 40),))
            )
        )
        with pytest.raises(EngineBusy, match="is needed by a search"):
            async for _ in parts:
                pass
        await scoring

    asyncio.run(interrupted())


def test_prompts_that_do_not_fit_name_the_field(scorer: ServeScorer, tied_family: Family) -> None:
    """A prompt without room, and a chat without a chat template, are refused with the name of the field."""
    for wrong, field, message in (
        ({"prompt": "1" * 5000}, "prompt", "tokens, but the context has"),
        ({"max_tokens": 10**6}, "max_tokens", "give at most"),
        ({"messages": ({"role": "user", "content": "hello"},)}, "messages", "send its prompt to /completions"),
    ):
        with pytest.raises(InvalidPrompt, match=message) as caught:
            completed(scorer, greedy(tied_family, 0.2, **wrong))
        assert caught.value.field == field


def test_a_closed_completion_frees_the_engine(scorer: ServeScorer, tied_family: Family) -> None:
    """An engine whose caller has gone ends the completion, and completes the next prompt at once."""

    async def leave() -> None:
        parts = ServeCompleter(scorer.app_name).complete(greedy(tied_family, 0.5, max_tokens=None))
        await anext(parts)
        await parts.aclose()

    asyncio.run(leave())
    started = time.monotonic()
    assert text(completed(scorer, greedy(tied_family, 0.2))[0])
    assert time.monotonic() - started < 20
