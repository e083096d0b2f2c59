from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from tests.conftest import write_choices
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.verification import nothing_to_compare, texts_to_read, verify
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Continuation, Generation, Prompts
from workers.types import SampleResult, Span, TaskSpec, VerificationReport

pytestmark = pytest.mark.slow  # transformers generates in each

OPTIONS = EngineOptions(max_model_len=128)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4)), OPTIONS)


def test_differences_have_margins(reference: Reference, tmp_path: Path, choices: TaskSpec) -> None:
    """Verification lists each difference with the margin of the choice."""
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": "?"}) for i in range(10)))
    spec = TaskSpec({"file": str(file), "max_tokens": 5}, "exact_match")
    spans = (Span("sums", spec, 0, 10), Span("choices", choices, 0, 12))
    evaluator = TaskEvaluator(reference, Prompts(reference.prompts.directory, OPTIONS))
    samples = list(evaluator.score(spans).samples)
    request = evaluator.requests(spec, 0)[0]
    known = {request.tokens: logprobs(reference.model, request.tokens)}

    def check(
        changed: Sequence[SampleResult], engine_logprobs: dict[tuple[int, ...], list[float]]
    ) -> VerificationReport:
        return verify(
            "digest",
            reference.prompts.directory,
            OPTIONS,
            samples=tuple(changed),
            spans=spans,
            dtype="float32",
            engine_logprobs=engine_logprobs,
        )

    report = check(samples, known)
    assert (report.num_samples, report.num_equal, report.num_beyond) == (22, 22, 0)
    assert report.max_logprob_difference < 1e-5

    # A wrong first token is no rounding unless the reference itself hardly preferred another.
    first = samples[0]
    gap = reference.gaps[request.tokens][0][1]
    changed = [replace(first, value=1 - first.value, response="\u20ac" + first.response), *samples[1:]]
    report = check(changed, {request.tokens: [value + 0.25 for value in known[request.tokens]]})
    (difference,) = report.differences
    assert (difference.objective, difference.position, difference.reference) == ("sums", 0, first.value)
    assert difference.top2_gap == pytest.approx(gap, abs=1e-4)
    assert report.num_beyond == (gap > 1e-3)
    assert report.max_logprob_difference == pytest.approx(0.25, abs=1e-4)

    # Options that agree to rounding explain another choice among them; options that do not, do not.
    last = samples[-1]
    moved = json.dumps([value + 1e-4 for value in json.loads(last.response)])
    report = check([*samples[:-1], replace(last, value=1 - last.value, response=moved)], {})
    assert (len(report.differences), report.num_beyond) == (1, 0)
    # Over the tokens of an option errors add up, as their root.
    lengths = []
    for asked in evaluator.requests(choices, 11):
        assert isinstance(asked, Continuation)
        lengths.append(len(asked.tokens) - asked.num_context)
    moved = json.dumps([value + 0.1 for value in json.loads(last.response)])
    (difference,) = check([*samples[:-1], replace(last, value=1 - last.value, response=moved)], {}).differences
    assert difference.top2_gap == pytest.approx(0.1 / min(lengths) ** 0.5, abs=1e-4)
    with pytest.raises(InvalidTask, match="no stored sample of choices at position 11"):
        check(samples[:-1], {})


class Scored:
    """Scores of twelve completions and twelve choices, from an engine that computes exactly as transformers.

    `verify` compares them after `change`, and with log-probabilities that are off by `nats`.
    """

    def __init__(self, reference: Reference, file: Path, choices: TaskSpec, *, max_tokens: int = 5) -> None:
        file.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": "?"}) for i in range(12)))
        sums = TaskSpec({"file": str(file), "max_tokens": max_tokens}, "exact_match")
        self.reference = reference
        self.spans: tuple[Span, ...] = (Span("sums", sums, 0, 12), Span("choices", choices, 0, 12))
        self.evaluator = TaskEvaluator(reference, Prompts(reference.prompts.directory, OPTIONS))
        self.samples = self.evaluator.score(self.spans).samples

    def verify(self, change: Callable[[SampleResult], SampleResult], *, nats: float = 0.0) -> VerificationReport:
        samples = tuple(map(change, self.samples))
        texts = texts_to_read(self.evaluator, self.samples, self.spans)
        return verify(
            "digest",
            self.reference.prompts.directory,
            OPTIONS,
            samples=samples,
            spans=self.spans,
            dtype="float32",
            engine_logprobs={text: [value + nats for value in logprobs(self.reference.model, text)] for text in texts},
        )


@pytest.fixture
def scored(reference: Reference, tmp_path: Path, choices: TaskSpec) -> Scored:
    return Scored(reference, tmp_path / "sums.jsonl", choices)


def in_sums(**changes: object) -> Callable[[SampleResult], SampleResult]:
    return lambda sample: replace(sample, **changes) if sample.objective == "sums" else sample  # type: ignore[arg-type]


def test_what_is_equal_is_equal_in_tokens_and_log_probabilities(scored: Scored) -> None:
    report = scored.verify(lambda sample: sample)
    assert (report.num_samples, report.num_equal, report.num_beyond, report.differences) == (24, 24, 0, ())
    assert report.num_tokens == sum(len(s.tokens[0]) for s in scored.samples if s.tokens) >= 12
    options = 12 * 3
    assert report.num_logprobs > options + report.num_tokens / 2, "of eight completions all tokens, and their prompts"
    assert report.max_logprob_difference < 1e-5
    assert (report.num_without_tokens, report.reason) == (0, None)


@pytest.mark.parametrize("is_stored", [True, False])
def test_garbage_that_scores_the_same_is_beyond_tolerance(scored: Scored, is_stored: bool) -> None:
    change = in_sums(response="##garbage##") if is_stored else in_sums(response="##garbage##", tokens=None)
    report = scored.verify(change)
    assert (report.num_equal, report.num_beyond) == (12, 12)
    assert {(difference.objective, difference.what) for difference in report.differences} == {("sums", "text")}
    assert report.num_without_tokens == (0 if is_stored else 12)


def test_other_tokens_are_beyond_tolerance(scored: Scored) -> None:
    """Other tokens are beyond tolerance unless transformers finds them as likely."""

    def with_token(index: int, token: int) -> Callable[[SampleResult], SampleResult]:
        def change(sample: SampleResult) -> SampleResult:
            if sample.objective != "sums":
                return sample
            ((*tokens,),) = sample.tokens or ((),)
            tokens[index] = token
            return replace(sample, tokens=(tuple(tokens),))

        return change

    for index, token in ((0, 3), (1, 3), (0, 10**6)):
        report = scored.verify(with_token(index, token))
        assert (report.num_equal, report.num_beyond) == (12, 12)
        assert {difference.what for difference in report.differences} == {"tokens"}


def test_wrong_logprobs_are_beyond_tolerance(scored: Scored) -> None:
    """Wrong log-probabilities are beyond tolerance, whatever is chosen."""
    report = scored.verify(lambda sample: sample, nats=2.0)
    assert report.num_beyond == len(report.differences) == 8 + 8, "the first of each objective"
    assert {difference.what for difference in report.differences} == {"log-probabilities"}
    assert report.max_logprob_difference == pytest.approx(2.0, abs=1e-4)

    def moved(sample: SampleResult) -> SampleResult:
        if sample.objective != "choices":
            return sample
        return replace(sample, response=json.dumps([value - 2.0 for value in json.loads(sample.response)]))

    report = scored.verify(moved)
    assert (report.num_equal, report.num_beyond) == (12, 12)
    assert {difference.objective for difference in report.differences} == {"choices"}


def test_nan_logprobs_are_beyond_tolerance(scored: Scored) -> None:
    """Log-probabilities that are not numbers are beyond tolerance."""
    for nats in (float("nan"), float("inf")):
        report = scored.verify(lambda sample: sample, nats=nats)
        assert report.num_beyond == 16
        json.dumps(asdict(report), allow_nan=False)


def test_a_completion_may_part_at_a_tie(tmp_path: Path, choices: TaskSpec) -> None:
    directory = str(tiny_llama(tmp_path / "llama", 4, tied=False))
    reference = Reference(directory, OPTIONS)
    (completion,) = reference.generate([Generation(tuple(reference.prompts.encode("0+0=")), 1)])
    (token,) = completion.tokens
    twin = token + 1
    with torch.no_grad():
        reference.model.lm_head.weight[twin] = reference.model.lm_head.weight[token]
    reference.model.save_pretrained(directory)
    scored = Scored(Reference(directory, OPTIONS), tmp_path / "sums.jsonl", choices, max_tokens=1)
    other: dict[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = {
        ((token,),): ((twin,),),
        ((twin,),): ((token,),),
    }
    num_swapped = sum(sample.tokens in other for sample in scored.samples)
    report = scored.verify(lambda sample: replace(sample, tokens=other.get(sample.tokens or (), sample.tokens)))
    assert len(report.differences) == num_swapped == 24 - report.num_equal > 0
    assert {(found.what, found.is_beyond) for found in report.differences} == {("tokens", False)}
    assert report.num_beyond == 0


def test_where_nothing_can_be_compared_it_is_said_why(
    scored: Scored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = scored.reference.prompts.directory
    assert nothing_to_compare(directory, scored.evaluator, scored.spans) is None
    monkeypatch.setattr("workers.engines.transformers.verification.free_host_bytes", lambda: 3 << 29)
    monkeypatch.setattr("workers.engines.transformers.verification.COPIES", 1 << 16)
    reason = nothing_to_compare(directory, scored.evaluator, scored.spans)
    assert re.fullmatch(
        r"an export and its model in transformers take \d+\.\d GiB of host memory; 1\.5 GiB are free", reason or ""
    )

    file = write_choices(
        tmp_path,
        output_type="generate_until",
        doc_to_target="{{options[gold]}}",
        doc_to_choice=None,
        generation_kwargs={"until": ["."], "do_sample": True, "temperature": 0.5, "max_gen_toks": 9},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    drawn = Span("drawn", TaskSpec(str(file), "exact_match"), 0, 4)
    reason = "completions drawn at a temperature above 0 cannot be repeated: drawn"
    assert nothing_to_compare(directory, scored.evaluator, [drawn]) == reason
    assert texts_to_read(scored.evaluator, (), [drawn]) == ()
    scored.spans = (*scored.spans, drawn)
    report = scored.verify(lambda sample: sample)
    assert (report.num_samples, report.num_equal, report.reason) == (24, 24, reason)
