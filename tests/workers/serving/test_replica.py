from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search_spaces.study.attacks import DeepWordBugAttack
from tests.workers.judged_tasks import write_task
from tests.workers.recipes import arithmetic, slerp
from tests.workers.serving.test_lost_processes import controller
from workers.engines.source_recipes import base_recipe
from workers.errors import TrialFailed
from workers.evaluation.attacks.checks import prepared_attack
from workers.evaluation.attacks.search import run, search
from workers.evaluation.sample_texts import sample_texts
from workers.evaluation.tasks import check_task
from workers.serving.serve_scorer import ServeScorer
from workers.types import Family, ScoreRequest, ScoreResult, Span, TaskSpec


def request(family: Family, weight: float, stop: int, task: TaskSpec) -> ScoreRequest:
    return ScoreRequest("study", arithmetic(family, weight, 0.1), (Span("x", task, 0, stop),))


def test_real_replica_mixes_no_results(scorer: ServeScorer, tied_family: Family, sums: TaskSpec) -> None:
    """Five recipes sent to one real replica together receive their own results."""
    requests = [request(tied_family, weight, 40, sums) for weight in (0.1, 0.4, 0.8, 1.2, 1.6)] * 3
    with ThreadPoolExecutor(len(requests)) as pool:
        results = list(pool.map(scorer.score, requests))
    alone = [scorer.score(each) for each in requests[:5]]
    for each, result, quiet in zip(requests, results, alone * 3, strict=True):
        assert result.evidence.recipe_digest == each.recipe.digest
        assert result.samples == quiet.samples
        assert result.evidence.weights_checksum == quiet.evidence.weights_checksum
        assert result.evidence.prompts == quiet.evidence.prompts
    assert len({result.evidence.weights_checksum for result in results}) == 5
    assert len({tuple(sample.response for sample in result.samples) for result in results}) == 5


def test_restarted_controller_finds_the_engine(scorer: ServeScorer, tied_family: Family, sums: TaskSpec) -> None:
    """A controller of Serve that was killed and restarted finds the real replica again; no other engine starts."""
    before = scorer.statistics()
    killed = controller()
    killed.kill()
    result = scorer.score(request(tied_family, 0.4, 40, sums))
    assert controller().pid != killed.pid
    after = scorer.statistics()
    assert (after["processes"], after["starts"]) == (before["processes"], before["starts"])
    assert scorer.score(request(tied_family, 0.4, 40, sums)).samples == result.samples


TIMER = """
import signal, time
from lm_eval.tasks.minerva_math.utils import is_equiv

def process_docs(dataset):
    return dataset

def ring(*_):
    raise TimeoutError

def process_results(doc, results):
    signal.signal(signal.SIGALRM, ring)
    signal.alarm(1)
    try:
        time.sleep(5)
    except TimeoutError:
        return {"exact_match": int(is_equiv(doc["problem"], doc["solution"]))}
"""


def test_metrics_have_timers_in_a_real_replica(scorer: ServeScorer, tied_family: Family, tmp_path: Path) -> None:
    equations = [{"problem": r"\frac{1}{2}", "solution": "0.5"}, {"problem": "x+x", "solution": "3x"}]
    spec = write_task(tmp_path, "timer", TIMER, equations)
    samples = scorer.score(request(tied_family, 0.1, 2, spec)).samples
    assert {sample.document: sample.value for sample in samples} == {"0": 1.0, "1": 0.0}


def test_real_replica_is_attacked(scorer: ServeScorer, tied_family: Family, sums: TaskSpec) -> None:
    """An attack runs on a real replica, which scores attacked templates as transformers does, and always alike."""
    assert isinstance(sums.task, Mapping)
    task = replace(sums, task={**sums.task, "prompt": "Answer the question {{prompt}}"}, content=None)
    recipe = base_recipe(tied_family)

    def scored(template: str) -> ScoreResult:
        return scorer.score(ScoreRequest("study", recipe, (Span("@x", replace(task, template=template), 0, 8),)))

    def variety(template: str) -> float:  # of a random model's answers, as none is right
        return float(np.mean([len(set(sample.response)) for sample in scored(template).samples]))

    attack = prepared_attack(DeepWordBugAttack(kind="deepwordbug", labels=("none",)), check_task(task))
    found, again = (run(search(attack, clean=variety(attack.original.text), seed=1), variety) for _ in range(2))
    assert found == again
    assert found.num_queries == 2 * (1 + 4)
    changed = next(iter(search(attack, clean=1, seed=1)))[0]
    assert scored(changed).evidence.prompts != scored(attack.original.text).evidence.prompts
    for template in (changed, found.template):
        span = Span("@x", replace(task, template=template), 0, 8)
        assert scorer.verify(recipe, scored(template).samples, (span,)).num_beyond == 0


def test_real_replica_agrees(scorer: ServeScorer, tied_family: Family, sums: TaskSpec, choices: TaskSpec) -> None:
    """A real replica of a tied model agrees with transformers."""
    info = scorer.describe((sums, choices))
    assert scorer.sample_texts(sums, 1, 4) == sample_texts(sums, 1, 4)
    assert [each.num_samples for each in info] == [400, 12]
    spans = (Span("sums", sums, 0, 60), Span("choices", choices, 0, 12))
    for recipe in (base_recipe(tied_family), slerp(tied_family, 0.4)):
        samples = scorer.score(ScoreRequest("study", recipe, spans)).samples
        report = scorer.verify(recipe, samples, spans)
        assert report.num_samples == 72
        assert report.num_beyond == 0
        assert report.max_logprob_difference < 1e-3
        assert (report.num_without_tokens, report.reason) == (0, None)
        assert report.num_tokens == sum(len(tokens) for sample in samples for tokens in sample.tokens or ()) > 60
        assert report.num_logprobs > 12 * 3
    garbage = tuple(replace(s, response="##") if s.objective == "sums" else s for s in samples)
    assert scorer.verify(recipe, garbage, spans).num_beyond == 60
    other = scorer.score(ScoreRequest("study", slerp(tied_family, 0.9), spans)).samples
    assert scorer.verify(recipe, other, spans).num_beyond >= 12, "the options' log-probabilities at least"
    statistics = scorer.statistics()
    assert (statistics["starts"], statistics["replicas"]) == (1, 1)
    assert statistics["swaps"] == len(statistics["swap_s"]) > 5
    assert statistics["bank"]["models"] == 3
    with pytest.raises(TrialFailed, match="logits are NaN"):
        scorer.score(ScoreRequest("study", arithmetic(tied_family, 1e40, 1e40), spans))
