from pathlib import Path

import pytest

from search_spaces.study.attacks import BertAttack, DeepWordBugAttack, StressAttack
from tests.builders import tiny_bert
from workers.errors import InvalidTask
from workers.evaluation.attacks.checks import prepared_attack
from workers.types import TaskInfo

BUG = DeepWordBugAttack(kind="deepwordbug")


def info(template: str, *options: str) -> TaskInfo:
    return TaskInfo(10, True, "multiple_choice", template=template, options=options)


def test_options_are_protected_by_default() -> None:
    """The options of a task are its labels, unless the attack names others."""
    facts = info("Rate {{text}} good or bad", "good", "bad")
    words = [prepared_attack(option, facts).original for option in (BUG, BUG.model_copy(update={"labels": ("rate",)}))]
    assert [[each.pieces[i].text for i in each.words] for each in words] == [["Rate"], ["good", "bad"]]


@pytest.mark.parametrize("option", [BUG, StressAttack(kind="stress")])
def test_no_protected_label_is_refused(option: DeepWordBugAttack | StressAttack) -> None:
    """An attack on a task without fixed options must name its labels."""
    with pytest.raises(InvalidTask, match="no label is protected") as caught:
        prepared_attack(option, info("Rate {{text}}"))
    assert caught.value.field == "attack.labels"


def test_no_words_to_attack_is_refused() -> None:
    """A template of placeholders, labels and stop words has no word to change; a sentence can still be added to it."""
    facts = info("{{text}} is it good?", "good")
    with pytest.raises(InvalidTask, match=r"'\{\{text\}\} is it good\?' has no words that an attack may change"):
        prepared_attack(BUG, facts)
    assert prepared_attack(StressAttack(kind="stress"), facts).original.text == facts.template


def test_no_template_is_refused() -> None:
    """A task whose prompts come from a function has no template."""
    with pytest.raises(InvalidTask, match="no single Jinja template"):
        prepared_attack(BUG, info("", "good"))


def test_missing_fill_mask_model_is_refused(tmp_path: Path) -> None:
    """The message names the place, the error the field, for the model and for the encoder."""
    facts = info("Rate {{text}}", "good")
    with pytest.raises(InvalidTask, match=str(tmp_path / "no-bert")) as caught:
        prepared_attack(BertAttack(kind="bert", model=str(tmp_path / "no-bert")), facts)
    assert caught.value.field == "attack.model"
    bert = tiny_bert(tmp_path / "bert")
    with pytest.raises(InvalidTask, match=str(tmp_path / "no-encoder")) as caught:
        prepared_attack(BertAttack(kind="bert", model=str(bert), encoder=str(tmp_path / "no-encoder")), facts)
    assert caught.value.field == "attack.encoder"
    assert prepared_attack(BertAttack(kind="bert", model=str(bert)), facts).original.words
