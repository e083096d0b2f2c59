"""A BERT-Attack on real models: a Llama that chooses between options, and a BERT that proposes words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from search_spaces.study.attacks import BertAttack
from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_bert, tiny_llama
from tests.conftest import write_choices
from workers.engines.transformers.backend import Reference
from workers.evaluation.attacks.checks import prepared_attack
from workers.evaluation.attacks.masked_model import MaskedModel
from workers.evaluation.attacks.search import run, search
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.tasks import check_task
from workers.types import Span, TaskSpec

TEMPLATE = "Judge the question as yes or no: {{question}}"


@pytest.mark.slow
def test_bert_attacks_a_llama(tmp_path: Path) -> None:
    """The attack finds a template on which the model is worse, of whole words with its labels, and again the same."""
    options = ["yes", "no", "maybe"]
    file = write_choices(tmp_path, doc_to_text=TEMPLATE, doc_to_choice=options)
    spec = TaskSpec(str(file), "acc")
    llama = Reference(str(tiny_llama(tmp_path / "llama", seed=3)), EngineOptions(max_model_len=256))
    evaluator = TaskEvaluator(llama, llama.prompts)
    asked: dict[str, float] = {}

    def margin(template: str) -> float:
        """Mean log-likelihood of the right option above the mean of all; each change of a prompt changes it."""
        if template in asked:
            return asked[template]
        scored = evaluator.score([Span("x", replace(spec, template=template), 0, 12)]).samples
        values = [np.array(json.loads(sample.response)) for sample in scored]
        gold = [int(sample.document) % 3 for sample in scored]
        asked[template] = (
            float(np.mean([each[right] - each.mean() for each, right in zip(values, gold, strict=True)])) + 10
        )
        return asked[template]

    bert = str(tiny_bert(tmp_path / "bert"))
    attack = prepared_attack(
        BertAttack(kind="bert", model=bert, candidates=12, min_similarity=-1.0, max_queries=12), check_task(spec)
    )
    clean = margin(TEMPLATE)
    found, again = (run(search(attack, clean=clean, seed=0, replacements=MaskedModel(bert)), margin) for _ in range(2))
    assert found == again
    assert found.num_queries == 12
    assert found.value < clean
    assert found.value == asked[found.template] == min(asked[text] for text in asked if "[UNK]" not in text)
    for text in asked:
        assert text.endswith("as yes or no: {{question}}")
