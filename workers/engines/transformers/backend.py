"""The same scores by plain transformers: slow, simple, and independent of vLLM.

Reads what the writer exported, so that a comparison with stored samples proves the whole way: merge, swap, scoring,
export. Always in fp32, greedy, on CPU.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.engines.host_memory import free_host_bytes
from workers.errors import InvalidTask
from workers.evaluation.prompts import LOGPROB_TOLERANCE, Continuation, Generation, Prompts
from workers.types import EngineOptions, SampleResult, Span, VerificationReport

if TYPE_CHECKING:
    from workers.evaluation.lm_eval import TaskEvaluator
    from workers.merging.bank import Bank

__all__ = ["Reference", "logprobs", "merged_model", "verify"]

BATCH = 64  # texts at once: bounds memory, not speed

# The attention that transformers writes out itself: its default leaves out Gemma-2's cap on the scores, silently.
ATTENTION = "eager"


class Reference:
    """A transformers model in float32, a Backend that also remembers how close each choice was.

    `gaps` maps a Generation's tokens to [(text so far, gap), ...] per step, the gap being the difference between the
    two best log-probabilities there.
    """

    def __init__(self, directory: str, options: EngineOptions) -> None:
        from transformers import AutoModelForCausalLM

        self.prompts = Prompts(directory, options)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        ).eval()
        self.gaps: dict[tuple[int, ...], list[tuple[str, float]]] = {}

    def generate(self, requests: Sequence[Generation]) -> list[str]:
        """Greedy. Raises InvalidTask for a request that samples: its draw cannot be repeated here."""
        if any(request.temperature > 0 for request in requests):
            raise InvalidTask("the task samples at a temperature above 0; only greedy completions can be verified")
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        texts: dict[int, str] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            texts.update(zip(batch, self._generate([requests[i] for i in batch]), strict=True))
        return [texts[i] for i in range(len(requests))]

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        results = []
        for request in requests:
            scores = _log_softmax(self.model, request.tokens)[request.num_context - 1 : -1]
            targets = torch.tensor(request.tokens[request.num_context :])
            chosen = scores.gather(-1, targets[:, None])[:, 0]
            results.append((float(chosen.sum()), bool((scores.argmax(-1) == targets).all())))
        return results

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Generation]) -> list[str]:
        width = max(len(request.tokens) for request in requests)
        # Padding on the left, masked out, so that all texts grow at the same column.
        ids = torch.tensor([[0] * (width - len(r.tokens)) + list(r.tokens) for r in requests])
        mask = torch.tensor([[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in requests])
        completions: list[list[int]] = [[] for _ in requests]
        steps: list[list[tuple[str, float]]] = [[] for _ in requests]
        texts: list[str | None] = [None] * len(requests)
        cache: Any = None
        while any(text is None for text in texts):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            best = output.logits[:, -1].float().log_softmax(-1).topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            tokens = best.indices[:, 0].tolist()
            for i, request in enumerate(requests):
                if texts[i] is None:
                    texts[i] = self._step(request, completions[i], steps[i], tokens[i], gaps[i])
            ids = best.indices[:, :1]
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=-1)
        for request, step in zip(requests, steps, strict=True):
            self.gaps[request.tokens] = step
        return [text for text in texts if text is not None]

    def _step(
        self, request: Generation, completion: list[int], steps: list[tuple[str, float]], token: int, gap: float
    ) -> str | None:
        """Take the next token; the final text if that ends the completion."""
        if token in self.prompts.stop_token_ids:
            text = self.prompts.decode(request.tokens, completion)
            steps.append((text, gap))
            return _whole(text)
        completion.append(token)
        text = self.prompts.decode(request.tokens, completion)
        steps.append((text, gap))
        ends = [text.find(stop) for stop in request.stop if stop in text]
        if ends:
            return text[: min(ends)]
        return _whole(text) if len(completion) == request.max_tokens else None


def merged_model(recipe: Recipe, bank: Bank, *, dtype: str) -> Any:
    """A transformers model on CPU with the merged weights of `recipe`, rounded to `dtype` and computing in fp32.

    Its weights are in memory once.
    """
    import transformers

    from workers.merging.materialize import merged_tensors

    config = transformers.AutoConfig.from_pretrained(bank.sources.result_dir, trust_remote_code=False)
    kind = getattr(transformers, config.architectures[0])
    model, found = kind.from_pretrained(
        None,
        config=config,
        state_dict={name: tensor.cpu().float() for name, tensor in merged_tensors(recipe, bank, getattr(torch, dtype))},
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        output_loading_info=True,
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise RuntimeError(f"the merge does not fit {config.architectures[0]}: {found}")
    return model.eval()


def logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probability (natural log) of each token but the first, given those before it."""
    scores = _log_softmax(model, tokens)[:-1]
    return [float(value) for value in scores.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]]


def verify(
    recipe_digest: str,
    directory: str,
    options: EngineOptions,
    *,
    samples: Sequence[SampleResult],
    spans: Sequence[Span],
    dtype: str,
    engine_logprobs: Mapping[tuple[int, ...], Sequence[float]],
    evaluation: TaskEvaluator | None = None,
) -> VerificationReport:
    """Score `spans` on the exported checkpoint in `directory` and compare with the stored `samples`.

    `evaluation` gives its tokenised requests; without it they are built anew with the exported tokenizer.
    `engine_logprobs` maps prompts to the log-probabilities the engine gave their tokens. Spans of tasks that sample
    are left out. Raises InvalidTask if a span's sample is not among `samples`.
    """
    from workers.evaluation.lm_eval import TaskEvaluator

    reference = Reference(directory, options)
    if evaluation is None:
        evaluation = TaskEvaluator(reference, Prompts(directory, options))
    else:
        evaluation = evaluation.with_backend(reference)
    greedy = tuple(span for span in spans if evaluation.is_greedy(span.task))
    known = {(sample.objective, sample.position): sample for sample in samples}
    scored = evaluation.score(greedy).samples
    if lost := [s for s in scored if (s.objective, s.position) not in known]:
        raise InvalidTask(f"verify: no stored sample of {lost[0].objective} at position {lost[0].position}")
    tasks = {span.objective: span.task for span in greedy}
    differences: list[dict[str, Any]] = []
    for expected in scored:
        stored = known[expected.objective, expected.position]
        if stored.value != expected.value:
            requests = evaluation.requests(tasks[expected.objective], expected.position)
            differences.append(
                {
                    "objective": expected.objective,
                    "position": expected.position,
                    "engine": stored.value,
                    "reference": expected.value,
                    "top2_gap": _gap(reference, requests, stored.response, expected.response),
                }
            )
    apart = [
        abs(ours - theirs)
        for tokens, values in engine_logprobs.items()
        for ours, theirs in zip(values, logprobs(reference.model, tokens), strict=True)
    ]
    del reference, evaluation
    gc.collect()
    tolerance = LOGPROB_TOLERANCE[dtype]
    return VerificationReport(
        recipe_digest=recipe_digest,
        num_samples=len(scored),
        num_equal=len(scored) - len(differences),
        max_logprob_difference=max(apart, default=0.0),
        tolerance=tolerance,
        differences=tuple(differences),
        num_beyond=sum(difference["top2_gap"] > tolerance for difference in differences),
    )


def _gap(reference: Reference, requests: Sequence[Any], stored: str, expected: str) -> float:
    """How near the choice was where the answers part: what rounding may flip is near zero.

    For completions the gap between the two best log-probabilities at the first token by which they differ; for scored
    options the largest difference between the engine's and the reference's log-probability of an option, divided by
    the root of the number of its tokens, over which errors of rounding add up.
    """
    if isinstance(requests[0], Continuation):
        answers = zip(requests, json.loads(stored), json.loads(expected), strict=True)
        apart = (
            abs(ours - theirs) / math.sqrt(max(1, len(request.tokens) - request.num_context))
            for request, ours, theirs in answers
        )
        return float(max(apart))
    steps = reference.gaps[requests[0].tokens]
    for text, gap in steps:
        if not stored.startswith(text.rstrip("\ufffd")):
            return gap
    return steps[-1][1]


def _whole(text: str) -> str:
    """Without the bytes of a character that was cut off: the engine holds them back until it is complete."""
    return text.rstrip("\ufffd")


@torch.inference_mode()
def _log_softmax(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocabulary] log-probabilities of what follows each token."""
    scores: torch.Tensor = model(input_ids=torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)
    return scores


def fits_in_memory(directory: str | Path) -> bool:
    """Whether a checkpoint's export and its fp32 model fit into the memory that is free now."""
    size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
    return bool(5 * size < free_host_bytes())
