import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.errors import EngineUnavailable, InvalidTask, TrialFailed
from workers.serving.fake import FakeScorer, expected_value
from workers.types import ScoreRequest, Span, TaskSpec

TASK = TaskSpec("arithmetic", "exact_match")
MODELS = {"base": "f0", "math": "f1", "text": "f2"}


def recipe(math: float, text: float) -> Recipe:
    def merge(layer: int | None) -> Merge:
        return Merge("task_arithmetic", (Source("math", layer), Source("text", layer)), {"lambda": (math, text)})

    return Recipe(MODELS, "base", (LayerRecipe(merge(0), merge(0), merge(0)),), merge(None), merge(None))


def request(of: Recipe, start: int = 0, stop: int = 100, objective: str = "math") -> ScoreRequest:
    return ScoreRequest("study", of, (Span(objective, TASK, start, stop),))


def mean(scorer: FakeScorer, of: Recipe, samples: int = 4000) -> float:
    values = [sample.value for sample in scorer.score(request(of, 0, samples)).samples]
    return sum(values) / len(values)


def test_results_depend_on_recipe_objective_and_position_only() -> None:
    whole = FakeScorer().score(request(recipe(0.3, 0.4)))
    parts = FakeScorer()
    first, second = parts.score(request(recipe(0.3, 0.4), 0, 30)), parts.score(request(recipe(0.3, 0.4), 30, 100))
    assert whole.samples == first.samples + second.samples
    assert whole.samples != FakeScorer().score(request(recipe(0.3, 0.5))).samples
    assert whole.evidence.recipe_digest == recipe(0.3, 0.4).digest


def test_fake_means_tend_to_the_answer() -> None:
    """Means tend to the known answer, and a merge beats its sources."""
    scorer = FakeScorer(num_samples=4000)
    for weights in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
        assert mean(scorer, recipe(*weights)) == pytest.approx(expected_value(recipe(*weights), "math"), abs=0.03)
    merged = expected_value(recipe(0.5, 0.5), "math")
    assert merged > max(expected_value(recipe(*weights), "math") for weights in ((0, 0), (1, 0), (0, 1)))


def test_failures_are_the_ones_that_were_asked_for(tmp_path: Path) -> None:
    scorer = FakeScorer(
        failing=frozenset({recipe(0.1, 0.1).digest}),
        fails_above=0.9,
        unavailable_calls=2,
        log_file=str(tmp_path / "calls"),
    )
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            scorer.score(request(recipe(0.2, 0.2)))
    for weights in ((0.1, 0.1), (0.95, 0.0)):
        with pytest.raises(TrialFailed):
            scorer.score(request(recipe(*weights)))
    scorer.score(request(recipe(0.2, 0.2), 10, 12))
    assert [call["outcome"] for call in scorer.calls()] == ["unavailable"] * 2 + ["failed"] * 2 + ["scored"]
    assert scorer.calls()[-1]["spans"] == [["math", 10, 12]]


def test_fake_dies_at_the_requested_call(tmp_path: Path) -> None:
    """The process dies at the requested call and not again."""
    scorer = FakeScorer(exits_at_call=2, log_file=str(tmp_path / "calls"))
    program = (
        "import pickle, sys; scorer, request = pickle.loads(sys.stdin.buffer.read())\n"
        "for _ in range(4): scorer.score(request)"
    )

    def run() -> int:
        payload = pickle.dumps((scorer, request(recipe(0.2, 0.2))))
        return subprocess.run([sys.executable, "-c", program], input=payload, check=False).returncode

    assert [run(), run()] == [70, 0]
    assert [call["outcome"] for call in scorer.calls()] == ["scored", "exit"] + ["scored"] * 4


def test_verification_counts_what_differs() -> None:
    scorer = FakeScorer()
    spans = (Span("math", TASK, 0, 20),)
    samples = scorer.score(ScoreRequest("study", recipe(0.2, 0.2), spans)).samples
    assert scorer.verify(recipe(0.2, 0.2), samples, spans).num_beyond == 0
    other = scorer.verify(recipe(0.9, 0.9), samples, spans)
    assert 0 < other.num_beyond == 20 - other.num_equal == len(other.differences)
    with pytest.raises(InvalidTask, match="no stored sample"):
        scorer.verify(recipe(0.2, 0.2), samples[:5], spans)


def test_inline_tasks_are_counted_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x", "answer": "y"}) + "\n" for _ in range(7)))
    infos = FakeScorer(num_samples=50).describe((TaskSpec({"file": str(file)}, "exact_match"), TASK))
    assert [info.num_samples for info in infos] == [7, 50]


def test_a_request_names_an_objective_once() -> None:
    """An engine reports one hash of prompts for each objective."""
    spans = tuple(Span(name, TASK, *at) for name, *at in (("math", 0, 30), ("text", 0, 30), ("math", 90, 270)))
    with pytest.raises(ValueError, match=r"'math' has 2 ranges of samples, \[0:30\] and \[90:270\]; .*study 'study'"):
        ScoreRequest("study", recipe(0.2, 0.2), spans)
