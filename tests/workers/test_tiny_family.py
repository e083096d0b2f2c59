"""The shipped family agrees with its description: small, in bfloat16, with disjoint splits, skills and experts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from search_spaces.study.file import load_study
from service.jobs.finetune.request import examine_finetune
from tests.benchmarks.family_training import (
    HOLDOUT_ITEMS,
    SEARCH_ITEMS,
    SHIPPED,
    SKILLS,
    VALIDATION_ITEMS,
    FamilyPlan,
    Item,
    Practice,
    exact_match,
    main,
    make_items,
    training_items,
)
from workers.tiny_family import RETRAIN_FILE, STUDY_FILE, family_dir
from workers.training.finetuning.fleet import load_pipeline

MODELS = ("base", *(f"experts/{skill}" for skill in SHIPPED))
OTHER = FamilyPlan(tuple(SKILLS), seed=1, holdout_items=2000)


def _items(skill: str, split: str) -> list[Item]:
    lines = (family_dir() / "tasks" / f"{skill}_{split}.jsonl").read_text().splitlines()
    return [Item(**json.loads(line)) for line in lines]


def test_family_is_smaller_than_ten_megabytes() -> None:
    files = [file for file in family_dir().rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < 10_000_000
    assert len([file for file in files if file.name == "model.safetensors"]) == 1 + len(SHIPPED)


@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_bfloat16(model: str) -> None:
    with safe_open(family_dir() / model / "model.safetensors", framework="pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("skill", SHIPPED)
def test_splits_are_disjoint_and_reproducible(skill: str) -> None:
    search, holdout = _items(skill, "search"), _items(skill, "holdout")
    assert (len(search), len(holdout)) == (SEARCH_ITEMS, HOLDOUT_ITEMS)
    made = make_items(skill)
    assert (search, holdout) == (made["search"], made["holdout"])
    prompts = {item.prompt for items in made.values() for item in items}
    assert len(prompts) == SEARCH_ITEMS + HOLDOUT_ITEMS + VALIDATION_ITEMS


@pytest.mark.parametrize("skill", SKILLS)
def test_another_familys_items_are_its_own_and_disjoint(skill: str) -> None:
    made, again = make_items(skill, plan=OTHER), make_items(skill, plan=OTHER)
    assert made == again
    assert [len(items) for items in made.values()] == [SEARCH_ITEMS, 2000, VALIDATION_ITEMS]
    prompts = {item.prompt for items in made.values() for item in items}
    assert len(prompts) == SEARCH_ITEMS + 2000 + VALIDATION_ITEMS
    assert made["search"] != make_items(skill)["search"]


@pytest.mark.parametrize(
    ("skill", "prompt", "answer"),
    [("shift", r"[+-][12] [a-z]{5,6}=", r"[a-z]{5,6}"), ("order", r"(up|down)( \d\d){3}=", r"\d\d \d\d \d\d")],
)
def test_skills_that_the_shipped_family_lacks(skill: str, prompt: str, answer: str) -> None:
    for item in make_items(skill, plan=OTHER)["search"][:50]:
        assert re.fullmatch(prompt, item.prompt)
        assert re.fullmatch(answer, item.answer)
        question, given = item.prompt[:-1].split(" ", 1)
        if skill == "shift":
            assert item.answer == "".join(chr((ord(c) - 97 + int(question)) % 26 + 97) for c in given)
        else:
            assert item.answer.split() == sorted(given.split(), reverse=question == "down")


def test_script_refuses_a_skill_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path), "--skills", "math,chess"])
    with pytest.raises(SystemExit):
        main()
    assert "unknown skills chess; known are math, text, lookup, shift, order" in capsys.readouterr().err


@pytest.mark.parametrize("skill", SKILLS)
def test_practice_never_shows_a_held_out_prompt(skill: str) -> None:
    held_out = {item.prompt for items in make_items(skill).values() for item in items}
    assert held_out.isdisjoint(item.prompt for item in Practice(SKILLS[skill], held_out=held_out, seed="a").take(2000))


@pytest.mark.parametrize("model", MODELS)
def test_tokenizers_agree_and_keep_space_and_newline(model: str) -> None:
    text = "rev a b\nc="
    ids = Tokenizer.from_file(str(family_dir() / model / "tokenizer.json")).encode(text).ids
    tokenizer = AutoTokenizer.from_pretrained(family_dir() / model)
    assert tokenizer(text).input_ids == ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_experts_are_better_than_the_base() -> None:
    """The base is half skilled, and every expert is 25 points better at its skill."""
    items = {skill: _items(skill, "holdout")[:200] for skill in SHIPPED}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        skilled = {
            model: {skill: sum(exact_match(_load(model), items[skill])) / 200 for skill in SHIPPED} for model in MODELS
        }
    finally:
        torch.set_num_threads(threads)
    base = skilled["base"]
    assert 0.2 <= sum(base.values()) / len(base) <= 0.6
    for skill in SHIPPED:
        own = skilled[f"experts/{skill}"]
        assert own[skill] >= base[skill] + 0.25
        assert own[skill] > max(own[other] for other in SHIPPED if other != skill)


def test_exact_match_is_greedy_decoding() -> None:
    model, tokenizer = _load("base"), AutoTokenizer.from_pretrained(family_dir() / "base")
    items = _items("math", "holdout")[:20]
    decoded = []
    for item in items:
        prompt = tokenizer(item.prompt, return_tensors="pt").input_ids
        new = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        decoded.append(tokenizer.decode(new, skip_special_tokens=True).strip() == item.answer)
    assert exact_match(model, items) == decoded
    assert 0 < sum(decoded) < len(decoded)


def _load(model: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(family_dir() / model, dtype=torch.float32).eval()


@pytest.mark.parametrize("skill", SHIPPED)
def test_training_items_are_not_held_out(skill: str) -> None:
    """Training items are those of the script, and none is held out."""
    training = _items(skill, "train")
    assert training == training_items(skill)
    held_out = {item.prompt for items in make_items(skill).values() for item in items}
    assert held_out.isdisjoint(item.prompt for item in training)


def test_the_family_is_retrained_as_the_demo_merges_it() -> None:
    pipeline = load_pipeline(family_dir() / RETRAIN_FILE)
    shipped = load_study(family_dir() / STUDY_FILE)
    retrained = pipeline.study_of({skill: Path(expert) for skill, expert in shipped.models.named.items()})
    assert retrained == shipped
    for skill, spec in pipeline.experts.items():
        assert (spec.base, spec.method.kind) == (shipped.models.base, "mergopt")
        assert spec.data.file == str(family_dir() / "tasks" / f"{skill}_train.jsonl")


@pytest.mark.slow
def test_the_retraining_is_accepted() -> None:
    examine_finetune(load_pipeline(family_dir() / RETRAIN_FILE))
