import json
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.study.sections import EngineOptions
from tests.builders import tiny_llama
from workers.engines.transformers.backend import Reference, logprobs
from workers.engines.transformers.verification import verify
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.types import Span, TaskSpec

OPTIONS = EngineOptions(max_model_len=128)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(str(tiny_llama(tmp_path_factory.mktemp("llama"), 4)), OPTIONS)


def test_verification_lists_each_difference_with_how_near_the_choice_was(
    reference: Reference, tmp_path: Path, choices: TaskSpec
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": "?"}) for i in range(10)))
    spec = TaskSpec({"file": str(file), "max_tokens": 5}, "exact_match")
    spans = (Span("sums", spec, 0, 10), Span("choices", choices, 0, 12))
    evaluator = TaskEvaluator(reference, Prompts(reference.prompts.directory, OPTIONS))
    samples = list(evaluator.score(spans).samples)
    request = evaluator.requests(spec, 0)[0]
    known = {request.tokens: logprobs(reference.model, request.tokens)}

    def check(changed: list[object], engine_logprobs: dict[tuple[int, ...], list[float]]):  # type: ignore[no-untyped-def]
        return verify(
            "digest",
            reference.prompts.directory,
            OPTIONS,
            samples=changed,  # type: ignore[arg-type]
            spans=spans,
            dtype="float32",
            engine_logprobs=engine_logprobs,
        )

    report = check([*samples], known)
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
    lengths = [len(asked.tokens) - asked.num_context for asked in evaluator.requests(choices, 11)]
    moved = json.dumps([value + 0.1 for value in json.loads(last.response)])
    (difference,) = check([*samples[:-1], replace(last, value=1 - last.value, response=moved)], {}).differences
    assert difference.top2_gap == pytest.approx(0.1 / min(lengths) ** 0.5, abs=1e-4)
    with pytest.raises(InvalidTask, match="no stored sample of choices at position 11"):
        check(samples[:-1], {})
