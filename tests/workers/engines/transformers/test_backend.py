from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from workers.engines.transformers.backend import Reference, choice_gaps, logprobs
from workers.errors import EvidenceMismatch, InvalidTask
from workers.evaluation.prompts import Completion, Continuation, Generation

OPTIONS = EngineOptions(max_model_len=128)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4)), OPTIONS)


def test_a_batch_without_room_is_halved(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with too little memory for a batch completes fewer texts at once; without room for one, it fails."""
    requests = [Generation(tuple(reference.prompts.encode(f"{i}" * (1 + i % 7) + "=")), 5, ()) for i in range(20)]
    expected = reference.generate(requests)
    generate, sizes, room = reference._generate, list[int](), 6

    def in_little_memory(batch: Sequence[Generation]) -> list[Completion]:
        sizes.append(len(batch))
        if len(batch) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(batch)

    monkeypatch.setattr(reference, "_generate", in_little_memory)
    finished: dict[int, Completion] = {}
    assert reference.generate(requests, finished=finished.__setitem__) == expected
    assert [finished[i] for i in range(20)] == expected
    assert sizes == [20, 10, 5, 5, 5, 5]
    monkeypatch.setattr(reference, "_halves_batches", False)
    with pytest.raises(torch.OutOfMemoryError):
        reference.generate(requests)
    assert sizes[6:] == [20]
    monkeypatch.setattr(reference, "_halves_batches", True)
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        reference.generate(requests)


def test_completions_are_those_of_transformers_own_generate(reference: Reference) -> None:
    texts = [f"{i}" * (1 + i % 7) + "=" for i in range(20)]
    requests = [Generation(tuple(reference.prompts.encode(text)), 12, ("7", "Zq")) for text in texts]
    ours = reference.generate(requests)
    for request, completion in zip(requests, ours, strict=True):
        ids = torch.tensor([request.tokens])
        generated = reference.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        tokens = generated[0, ids.shape[1] :].tolist()
        text = reference.prompts.tokenizer.decode([token for token in tokens if token != 2])
        assert completion.text == text.split("7")[0].split("Zq")[0]
        assert list(completion.tokens) == tokens[: len(completion.tokens)]
    assert any(completion.text for completion in ours)
    assert len({len(completion.text) for completion in ours}) > 1, "some stopped early, some did not"


def test_tokens_of_a_completion_include_the_one_that_ends_it(reference: Reference) -> None:
    request = Generation(tuple(reference.prompts.encode("12+30=")), 12)
    (whole,) = reference.generate([request])
    assert len(whole.tokens) == 12
    stop = whole.text[5]
    (stopped,) = reference.generate([replace(request, stop=(stop,))])
    assert stopped.text == whole.text.split(stop)[0]
    texts = [reference.prompts.decode(request.tokens, whole.tokens[:n]) for n in range(13)]
    num_tokens = next(n for n, text in enumerate(texts) if stop in text)
    assert stopped.tokens == whole.tokens[:num_tokens]
    ending = Reference(reference.prompts.directory, OPTIONS)
    ending.prompts.__dict__["stop_token_ids"] = (whole.tokens[0],)
    assert ending.generate([request]) == [Completion("", whole.tokens[:1])]


def test_gaps_say_how_far_each_token_is_from_the_best(reference: Reference) -> None:
    request = Generation(tuple(reference.prompts.encode("12+30=")), 4)
    (completion,) = reference.generate([request])
    assert choice_gaps(reference.model, request.tokens, completion.tokens) == pytest.approx([0.0] * 4, abs=1e-5)
    scores = reference.model(input_ids=torch.tensor([request.tokens])).logits[0, -1].log_softmax(-1)
    (best, second), (_, other) = scores.topk(2)
    (gap, *_) = choice_gaps(reference.model, request.tokens, (int(other), *completion.tokens[1:]))
    assert gap == pytest.approx((best - second).item(), abs=1e-5)
    assert gap == pytest.approx(reference.gaps[request.tokens][0][1], abs=1e-5)


def test_loglikelihood_is_the_sum_over_the_scored_tokens(reference: Reference) -> None:
    tokens = tuple(reference.prompts.encode("1+1=2 and"))
    each = logprobs(reference.model, tokens)
    ((total, is_best),) = reference.loglikelihoods([Continuation(tokens, 4)])
    assert total == pytest.approx(sum(each[3:]), abs=1e-5)
    assert not is_best
    best = list(tokens[:4])
    best.append(int(reference.model(input_ids=torch.tensor([best])).logits[0, -1].argmax()))
    assert reference.loglikelihoods([Continuation(tuple(best), 4)])[0][1]


def test_requests_that_sample_are_refused(reference: Reference) -> None:
    with pytest.raises(InvalidTask, match="only greedy completions can be verified"):
        reference.generate([Generation((1, 5), 3, temperature=0.7)])


def test_infinite_logits_are_no_reference_and_masked_ones_are(reference: Reference) -> None:
    tokens = tuple(reference.prompts.encode("1+1=2 and"))
    value = -float("inf")

    def change(model: Any, arguments: Any, output: Any) -> None:
        output.logits[..., 0] = value  # the padding, which the text does not hold

    hook = reference.model.register_forward_hook(change)
    try:
        assert reference.generate([Generation(tokens, 3)])
        ((total, _),) = reference.loglikelihoods([Continuation(tokens, 4)])
        assert total > -float("inf")
        value = float("inf")
        for ask in (
            lambda: reference.generate([Generation(tokens, 3)]),
            lambda: reference.loglikelihoods([Continuation(tokens, 4)]),
        ):
            with pytest.raises(EvidenceMismatch, match=r"transformers are infinite \(\d+ rows in 1 prompts\)"):
                ask()
    finally:
        hook.remove()


def test_completions_need_logits_at_the_last_position_only(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a prompt have one row; a model that computes all of them anyway gives the same completion."""
    num_rows: list[int] = []
    hook = reference.model.register_forward_hook(lambda *arguments: num_rows.append(arguments[-1].logits.shape[1]))
    request = Generation(tuple(reference.prompts.encode("12+30=")), 3)
    try:
        (completion,) = reference.generate([request])
        assert num_rows == [1, 1, 1]
        num_rows.clear()
        forward = type(reference.model).forward

        def without(self: Any, *, input_ids: Any, attention_mask: Any, position_ids: Any, **cache: Any) -> Any:
            assert set(cache) == {"past_key_values", "use_cache"}
            return forward(self, input_ids, attention_mask=attention_mask, position_ids=position_ids, **cache)

        monkeypatch.setattr(type(reference.model), "forward", without)
        assert reference.generate([request]) == [completion]
        assert num_rows == [len(request.tokens), 1, 1]
    finally:
        hook.remove()
