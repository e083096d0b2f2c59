"""Plain transformers as a backend: slow, simple and independent of vLLM.

The backend always computes in float32, by default on CPU, and generates greedily. The module also compares
log-probabilities.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from search_spaces.study.engine import EngineOptions
from workers.engines.logits import bad_rows, in_words
from workers.engines.transformers.batches import BATCH
from workers.errors import EvidenceMismatch, InvalidTask
from workers.evaluation.prompts import Completion, Continuation, Generation, Prompts

__all__ = [
    "ATTENTION",
    "Reference",
    "choice_gaps",
    "float32_model",
    "logprobs",
    "next_token_scores",
    "typical_difference",
    "whole_characters",
]

log = logging.getLogger(__name__)

# Eager attention: transformers' default silently ignores Gemma-2's cap on attention scores.
ATTENTION = "eager"


def float32_model(directory: str) -> Any:
    """The causal language model in `directory` with transformers, in float32 on CPU, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
    )
    return model.eval()


class Reference:
    """Transformers model in float32 that completes prompts greedily, and records how clear each choice of a token was.

    A gap is the difference between the log-probabilities of the chosen and the second likeliest token. `gaps` maps the
    token ids of a prompt to a list with (text so far, gap) for each generated token. If `model` is given, it is used
    instead of the model in `directory`; then `directory` needs only the tokenizer and the configuration. The model
    computes on `device`; a given `model` stays where it is. If a GPU has too little memory for a batch, the batch is
    halved; with `halves_batches` False, this is an error.
    """

    def __init__(
        self,
        directory: str,
        options: EngineOptions,
        *,
        model: Any = None,
        device: str = "cpu",
        halves_batches: bool = True,
    ) -> None:
        self.prompts = Prompts(directory, options)
        self._halves_batches = halves_batches
        self.model = model or float32_model(directory).to(device)
        self.gaps: dict[tuple[int, ...], list[tuple[str, float]]] = {}

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Generate greedy completions in batches, and return them in the order of `requests`.

        A batch for which a GPU has too little memory is halved, and so are all later batches. After each batch,
        `finished` is called, if it is not None, with (index, completion) for each request of the batch. Raises
        InvalidTask for a request with a temperature above 0, because the engine's random draws cannot be repeated.
        Raises OutOfMemoryError if a GPU has too little memory for a single text, or for a batch that is not halved.
        """
        if any(request.temperature > 0 for request in requests):
            raise InvalidTask("the task samples at a temperature above 0; only greedy completions can be verified")
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].tokens))
        completions: dict[int, Completion] = {}
        most = BATCH
        while batch := order[len(completions) : len(completions) + most]:
            found = self._generate_if_room([requests[i] for i in batch])
            if found is None:
                most = (len(batch) + 1) // 2
                log.warning("a GPU has too little memory for a batch of %d texts; halved", len(batch))
                torch.cuda.empty_cache()
                continue
            for index, completion in zip(batch, found, strict=True):
                completions[index] = completion
                if finished is not None:
                    finished(index, completion)
        return [completions[i] for i in range(len(requests))]

    def _generate_if_room(self, requests: Sequence[Generation]) -> list[Completion] | None:
        """The completions of a batch; None if a GPU has too little memory for it, and the batch can be halved.

        When this method has returned None, the memory of the batch can be freed.
        """
        try:
            return self._generate(requests)
        except torch.OutOfMemoryError:
            if len(requests) == 1 or not self._halves_batches:
                raise
            return None

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        results = []
        for request in requests:
            scores = next_token_scores(self.model, request.tokens)[request.num_context - 1 : -1]
            targets = torch.tensor(request.tokens[request.num_context :], device=scores.device)
            chosen = scores.gather(-1, targets[:, None])[:, 0]
            results.append((float(chosen.sum()), bool((scores.argmax(-1) == targets).all())))
        return results

    @torch.inference_mode()
    def _generate(self, requests: Sequence[Generation]) -> list[Completion]:
        width = max(len(request.tokens) for request in requests)
        # Padding on the left, masked out, so that all texts grow in the same column.
        device = _device_of(self.model)
        ids = torch.tensor([[0] * (width - len(r.tokens)) + list(r.tokens) for r in requests], device=device)
        mask = torch.tensor([[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in requests], device=device)
        chosen: list[list[int]] = [[] for _ in requests]
        steps: list[list[tuple[str, float]]] = [[] for _ in requests]
        texts: list[str | None] = [None] * len(requests)
        cache: Any = None
        while any(text is None for text in texts):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **_last_logits_only(self.model),
            )
            cache = output.past_key_values
            best = _checked(output.logits[:, -1], len(requests)).float().log_softmax(-1).topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            tokens = best.indices[:, 0].tolist()
            for i, request in enumerate(requests):
                if texts[i] is None:
                    texts[i] = self._step(request, chosen[i], steps[i], tokens[i], gaps[i])
            ids = best.indices[:, :1]
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=-1)
        for request, step in zip(requests, steps, strict=True):
            self.gaps[request.tokens] = step
        return [Completion(text or "", tuple(ids)) for text, ids in zip(texts, chosen, strict=True)]

    def _step(
        self, request: Generation, chosen: list[int], steps: list[tuple[str, float]], token: int, gap: float
    ) -> str | None:
        """Append one generated token to a completion; return the final text if the completion ends, else None.

        `request` has the prompt, and `chosen` has the tokens that were generated for it so far, to which `token` is
        appended. `gap` is the difference between the log-probabilities of the token and of the second likeliest token;
        the pair (text so far, `gap`) is appended to `steps`. A completion ends with an end-of-text token, a stop
        string, or the last of the tokens that `request` allows.
        """
        chosen.append(token)
        is_end = token in self.prompts.stop_token_ids
        text = self.prompts.decode(request.tokens, chosen[:-1] if is_end else chosen)
        steps.append((text, gap))
        if is_end:
            return whole_characters(text)
        ends = [text.find(stop) for stop in request.stop if stop in text]
        if ends:
            return text[: min(ends)]
        return whole_characters(text) if len(chosen) == request.max_tokens else None


def logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    """The log-probability that `model` gives to each of `tokens` except the first, given the tokens before it.

    Log-probabilities are natural logarithms.
    """
    scores = next_token_scores(model, tokens)[:-1]
    return [float(value) for value in scores.gather(-1, torch.tensor(tokens[1:], device=scores.device)[:, None])[:, 0]]


@torch.inference_mode()
def choice_gaps(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    """Gap in log-probability between each token of `completion` and the likeliest token at its position, by `model`.

    `prompt` and `completion` are token ids. A gap is the log-probability (natural log) of the likeliest token minus the
    log-probability of the token in `completion`; it is 0 if the token is the likeliest. The log-probabilities are
    conditional on `prompt` and the preceding tokens of `completion`.
    """
    scores = next_token_scores(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    chosen = scores.gather(-1, torch.tensor(completion, device=scores.device)[:, None])[:, 0]
    return [float(gap) for gap in scores.amax(-1) - chosen]


def typical_difference(ours: Sequence[float], theirs: Sequence[float], *, dtype: str) -> float:
    """Difference, in nats, between the log-probabilities by the engine and by transformers for the same tokens.

    `ours` are the engine's log-probabilities; the engine computes in `dtype`. `theirs` are transformers'
    log-probabilities. For "float32" the result is the largest absolute difference. For dtypes of 16 bits it is the root
    mean square of the differences: rounding errors are small on average there, but can change the log-probabilities of
    single unlikely tokens by large amounts. The result is NaN if a list contains NaN.
    """
    apart = [0.0 if a == b else abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return float(np.max(apart) if dtype == "float32" else np.sqrt(np.mean(np.square(apart))))


def whole_characters(text: str) -> str:
    """Remove replacement characters (U+FFFD) from the end of `text`.

    A tokenizer decodes a character whose last bytes are still missing to replacement characters. Engines leave this
    character out of their text, so this function also leaves it out.
    """
    return text.rstrip("\ufffd")


@torch.inference_mode()
def next_token_scores(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """A transformers model's log-probabilities [num_tokens, vocabulary] of the next token after each of `tokens`.

    The result is on the model's device. Raises EvidenceMismatch if logits are NaN or infinite.
    """
    logits = _checked(model(input_ids=torch.tensor([list(tokens)], device=_device_of(model))).logits[0], 1)
    return logits.float().log_softmax(-1)


def _device_of(model: Any) -> Any:
    """The device on which a model's inputs are made: the model's device, or "cpu" for a wrapper that has no device."""
    return getattr(model, "device", "cpu")


def _last_logits_only(model: Any) -> dict[str, int]:
    """Keyword arguments that make a model compute logits at the last position only; empty if it has no such option.

    The logits of a batch of prompts at all positions may need more memory than the weights.
    """
    forward = getattr(model, "forward", None)
    known = inspect.signature(forward).parameters if forward is not None else {}
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}


def _checked(logits: torch.Tensor, num_prompts: int) -> torch.Tensor:
    """Return `logits` unchanged; raise EvidenceMismatch if they contain NaN or are infinite.

    Engines refuse to score a merge whose logits are NaN or infinite. Therefore an engine that has scored this merge had
    other weights than transformers. `num_prompts`, the number of prompts, is for the message.
    """
    if any(rows := bad_rows(logits).tolist()):
        raise EvidenceMismatch(
            f"the merged model's logits by transformers are {in_words(rows, num_prompts=num_prompts)}"
        )
    return logits
