from typing import Any

import pytest
import torch

from search_spaces.study.sections import EngineOptions
from tests.builders import tiny_llama
from workers.engines.transformers.backend import Reference, logprobs
from workers.errors import EvidenceMismatch, InvalidTask
from workers.evaluation.prompts import Continuation, Generation

OPTIONS = EngineOptions(max_model_len=128)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4)), OPTIONS)


def test_completions_are_those_of_transformers_own_generate(reference: Reference) -> None:
    texts = [f"{i}" * (1 + i % 7) + "=" for i in range(20)]
    requests = [Generation(tuple(reference.prompts.encode(text)), 12, ("7", "Zq")) for text in texts]
    ours = reference.generate(requests)
    for request, text in zip(requests, ours, strict=True):
        ids = torch.tensor([request.tokens])
        generated = reference.model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        completion = [token for token in generated[0, ids.shape[1] :].tolist() if token != 2]
        assert text == reference.prompts.tokenizer.decode(completion).split("7")[0].split("Zq")[0]
    assert any(ours)
    assert len({len(text) for text in ours}) > 1, "some stopped early, some did not"


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
