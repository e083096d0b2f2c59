"""Models with different tokens, brought to one vocabulary, and compared with mergekit if both have the same rule."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from search_spaces.recipe import Recipe
from tests.builders import lora_adapter, tiny_llama, with_tokens
from tests.workers.recipes import arithmetic
from workers.errors import InvalidModel
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.merging.plan import check_recipe
from workers.models.family import open_family, resolve_family
from workers.models.vocabulary import TokenRow
from workers.types import Family

NUM_TOKENS = 100  # of the character tokenizer
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with Llamas that have different vocabularies.

    The Llamas are base (100 tokens), wizard (one more), tools (two more, one of them the wizard's), and padded (128
    rows for 100 tokens).
    """
    root = tmp_path_factory.mktemp("vocabularies")
    tiny_llama(root / "padded", tied=False)
    with_tokens(root / "padded", root / "base", noise=0)
    with_tokens(root / "base", root / "wizard", "<wizard>", seed=1)
    with_tokens(root / "base", root / "tools", "<tool>", "<wizard>", seed=2)
    return root


def family_of(root: Path, *experts: str, base: str = "base", tokenizer: str = "base") -> Family:
    places = {alias: root / alias for alias in experts}
    return open_family(root / base, places, tokenizer=tokenizer, cache=root / "cache")


def bank_of(root: Path, *experts: str, **settings: str) -> Bank:
    return Bank(family_of(root, *experts, **settings), cache=root / "cache")


def rows(root: Path, alias: str, name: str = EMBEDDING) -> torch.Tensor:
    found: torch.Tensor = load_file(root / alias / "model.safetensors")[name]
    return found


def problems_of(base: Path, tokenizer: str = "base", **experts: Path) -> str:
    with pytest.raises(InvalidModel) as caught:
        resolve_family(base, experts, tokenizer=tokenizer)
    return str(caught.value)


def test_rows_of_tokens_that_the_base_lacks_are_left_out(models: Path) -> None:
    bank = bank_of(models, "wizard", "tools")
    for name in (EMBEDDING, HEAD):
        for alias in ("wizard", "tools"):
            found = bank.get(alias, name)
            assert torch.equal(found, rows(models, alias, name)[:NUM_TOKENS])
        assert torch.equal(bank.get("base", name), rows(models, "base", name))
    assert bank.base.config["vocab_size"] == NUM_TOKENS


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_union_has_every_token(models: Path, name: str) -> None:
    """A union has every token, and no task vector where a model lacks the token."""
    bank = bank_of(models, "wizard", "tools", tokenizer="union")
    base, wizard, tools = (rows(models, alias, name) for alias in ("base", "wizard", "tools"))
    tool, mean = tools[100], (wizard[100] + tools[101]) / 2
    expected = {
        "base": torch.cat([base, torch.stack([tool, mean])]),
        "wizard": torch.cat([wizard[:100], torch.stack([tool, wizard[100]])]),
        "tools": tools,
    }
    for alias, tensor in expected.items():
        torch.testing.assert_close(bank.get(alias, name), tensor, rtol=0, atol=1e-7)
    assert torch.equal(bank.get("wizard", name)[100], bank.get("base", name)[100])
    assert bank.base.config["vocab_size"] == 102
    assert bank.get("base", "model.norm.weight").shape == (32,)


def test_an_experts_vocabulary_orders_the_rows_of_all(models: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(models / "wizard", tmp_path / "mixed")
    order = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    document = json.loads((mixed / "tokenizer.json").read_text())
    place = {int(old): new for new, old in enumerate(order)}
    document["model"]["vocab"] = {token: place[id_] for token, id_ in document["model"]["vocab"].items()}
    for token in document["added_tokens"]:
        token["id"] = place[token["id"]]
    (mixed / "tokenizer.json").write_text(json.dumps(document))
    stored = load_file(mixed / "model.safetensors")
    save_file({n: t[order] if n in (EMBEDDING, HEAD) else t for n, t in stored.items()}, mixed / "model.safetensors")
    settings = json.loads((mixed / "config.json").read_text()) | {"bos_token_id": place[1], "eos_token_id": place[2]}
    (mixed / "config.json").write_text(json.dumps(settings))
    places = {"mixed": mixed, "wizard": models / "wizard", "tools": models / "tools"}
    for tokenizer in ("mixed", "base", "union"):
        bank = Bank(open_family(models / "base", places, tokenizer=tokenizer, cache=tmp_path), cache=tmp_path)
        assert torch.equal(bank.get("mixed", EMBEDDING), bank.get("wizard", EMBEDDING))
        base = rows(models, "base")
        found = bank.get("base", EMBEDDING)
        if tokenizer == "mixed":
            mean = (2 * rows(models, "wizard")[100] + rows(models, "tools")[101]) / 3
            torch.testing.assert_close(found, torch.cat([base, mean[None]])[order])
            assert (bank.base.config["bos_token_id"], bank.base.config["eos_token_id"]) == (place[1], place[2])
        else:
            assert torch.equal(found[:100], base)
            assert bank.base.config["eos_token_id"] == 2


def test_rows_that_stand_for_no_token_are_the_bases(models: Path, tmp_path: Path) -> None:
    # As with Qwen: 128 rows for 100 tokens; one model takes an unnamed row for its token, one has dropped them.
    same = with_tokens(models / "padded", tmp_path / "same", "<tool>", rows=128)
    places = {"same": same, "wizard": models / "wizard"}
    padded = rows(models, "padded")
    for tokenizer in ("base", "union", "same"):
        bank = Bank(open_family(models / "padded", places, tokenizer=tokenizer, cache=tmp_path), cache=tmp_path)
        num_added = {"base": 0, "union": 2, "same": 1}[tokenizer]
        owner = rows(tmp_path, "same") if tokenizer == "same" else padded
        for alias in ("base", "same", "wizard"):
            found = bank.get(alias, EMBEDDING)
            assert found.shape == padded.shape
            assert torch.equal(found[100 + num_added :], owner[100 + num_added :])
        assert torch.equal(bank.get("wizard", EMBEDDING)[:100], rows(models, "wizard")[:100])
        assert torch.equal(bank.get("same", EMBEDDING)[:100], rows(tmp_path, "same")[:100])
        if tokenizer != "base":
            assert torch.equal(bank.get("same", EMBEDDING)[100], rows(tmp_path, "same")[100])


NEW, AS_A = TokenRow("tools", "<tool>"), TokenRow("base", "a")


@pytest.mark.parametrize(
    ("tokens", "hole"),
    [
        ({"<new>": NEW}, 0),
        ({"<end>": AS_A}, 0),
        ({"<end>": AS_A, "<new>": NEW}, 0),
        ({"<end>": TokenRow()}, 0),
        ({"<end>": AS_A}, 3),
    ],
)
def test_tokens_without_a_row_get_one_before_new_ones(
    models: Path, tmp_path: Path, tokens: dict[str, TokenRow], hole: int
) -> None:
    """A tokenizer with a token beyond the embedding, as Llama 2 with an added `<pad>`, perhaps after ids left out."""
    base = shutil.copytree(models / "base", tmp_path / "rowless")
    document, last = json.loads((base / "tokenizer.json").read_text()), NUM_TOKENS + hole
    if hole:  # transformers numbers added tokens without holes
        document["model"]["vocab"]["<end>"] = last
    else:
        document["added_tokens"].append({**document["added_tokens"][0], "id": last, "content": "<end>"})
    (base / "tokenizer.json").write_text(json.dumps(document))
    experts = {"wizard": models / "wizard", "tools": models / "tools"}
    vocabulary = {"tokens": {token: {"model": row.model, "token": row.token} for token, row in tokens.items()}}
    bank = Bank(resolve_family(base, experts, vocabulary=vocabulary, cache=tmp_path).family, cache=tmp_path)
    tool, a = rows(models, "tools")[100], rows(tmp_path, "rowless")[token_ids(base)["a"]]
    for alias in ("base", "wizard", "tools"):
        found = bank.get(alias, EMBEDDING)
        own = rows(models, alias)
        assert len(found) == bank.base.config["vocab_size"] == last + 1 + ("<new>" in tokens)
        assert torch.equal(found[:NUM_TOKENS], own[:NUM_TOKENS])
        assert not found[NUM_TOKENS:last].any()
        assert torch.equal(found[last], a if tokens.get("<end>") == AS_A else torch.zeros(32))
        assert "<new>" not in tokens or torch.equal(found[last + 1], tool)
    ids = token_ids(bank.sources.result_dir)
    assert (ids["<end>"], ids.get("<new>", last + 1)) == (last, last + 1)


def test_equal_vocabularies_are_left_as_they_are(models: Path) -> None:
    with_tokens(models / "wizard", models / "wizard2", seed=5)
    for tokenizer in ("base", "union", "wizard2"):
        bank = bank_of(models, "wizard2", base="wizard", tokenizer=tokenizer)
        assert not bank.token_alignment.tensors
        assert torch.equal(bank.get("wizard2", HEAD), rows(models, "wizard2", HEAD))


def test_dtypes_that_differ_lose_nothing(models: Path, tmp_path: Path) -> None:
    half = shutil.copytree(models / "wizard", tmp_path / "half")
    stored = load_file(half / "model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in stored.items()}, half / "model.safetensors", {"format": "pt"}
    )
    family = open_family(models / "base", {"half": half}, tokenizer="union", cache=tmp_path)
    bank = Bank(family, cache=tmp_path)
    found = bank.get("half", EMBEDDING)
    assert found.dtype == torch.bfloat16  # it has every row itself
    assert bank.get("base", EMBEDDING).dtype == torch.float32
    assert torch.equal(bank.get("base", EMBEDDING)[100], found[100].float())


def test_an_adapter_may_bring_tokens(models: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    model = lora_adapter(models / "wizard", adapter, modules_to_save=["embed_tokens", "lm_head"]).merge_and_unload()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models / "wizard" / name, adapter / name)
    for tokenizer, num_rows in (("base", 100), ("union", 101), ("adapter", 101)):
        family = open_family(models / "base", {"adapter": adapter}, tokenizer=tokenizer, cache=tmp_path)
        found = Bank(family, cache=tmp_path).get("adapter", EMBEDDING)
        torch.testing.assert_close(found, model.state_dict()[EMBEDDING][:num_rows])
    (adapter / "tokenizer.json").unlink()
    message = f"{adapter}: has 101 rows for tokens, the base 100, and {adapter} no tokenizer.json to align them by"
    assert message in problems_of(models / "base", adapter=adapter)


# Merges.


@pytest.mark.parametrize("tokenizer", ["base", "union", "tools"])
def test_mergekit_aligns_alike(models: Path, tmp_path: Path, tokenizer: str) -> None:
    """Where no row is unnamed; the order of a union's tokens is mergekit's own."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    document: dict[str, Any] = {
        "merge_method": "task_arithmetic",
        "base_model": str(models / "base"),
        "models": [
            {"model": str(models / alias), "parameters": {"weight": weight}}
            for alias, weight in (("wizard", 0.3), ("tools", 0.4))
        ],
        "parameters": {"normalize": False},
        "dtype": "float32",
        "tokenizer_source": str(models / tokenizer) if tokenizer == "tools" else tokenizer,
    }
    options = MergeOptions(device="cpu", write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(document), str(tmp_path / "theirs"), options)
    family = family_of(models, "wizard", "tools", tokenizer=tokenizer)
    bank = Bank(family, cache=models / "cache")
    ours = dict(merged_tensors(replace(arithmetic(family, 0.3, 0.4), tokenizer=tokenizer), bank, torch.float32))
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ids = {
        place: token_ids(directory)
        for place, directory in (("ours", Path(bank.sources.result_dir)), ("theirs", tmp_path / "theirs"))
    }
    assert ids["ours"].keys() == ids["theirs"].keys()
    assert len(ids["ours"]) == len(ours[EMBEDDING]) == len(theirs[EMBEDDING])
    order = [ids["theirs"][token] for token in sorted(ids["ours"], key=ids["ours"].__getitem__)]
    for name, tensor in ours.items():
        expected = theirs[name][order] if name in (EMBEDDING, HEAD) else theirs[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def token_ids(directory: str | Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    ids: dict[str, int] = AutoTokenizer.from_pretrained(directory).get_vocab()
    return ids


@pytest.mark.parametrize(("tokenizer", "size"), [("base", 100), ("union", 102), ("wizard", 101)])
def test_an_export_has_the_tokenizer_of_its_vocabulary(models: Path, tmp_path: Path, tokenizer: str, size: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family = family_of(models, "wizard", "tools", tokenizer=tokenizer)
    bank = Bank(family, cache=models / "cache")
    recipe = replace(arithmetic(family, 0.3, 0.4), tokenizer=tokenizer)
    out = export(recipe, bank, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    read = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(read) == size == model.lm_head.weight.shape[0]
    text = "a <wizard>"
    assert read.decode(read(text)["input_ids"], skip_special_tokens=False).replace("<s>", "").strip() == text
    if tokenizer != "base":
        row = read.convert_tokens_to_ids("<wizard>")
        torch.testing.assert_close(
            model.get_input_embeddings().weight[row],
            bank.get("base", EMBEDDING)[row]
            + sum(
                weight * (bank.get(alias, EMBEDDING)[row] - bank.get("base", EMBEDDING)[row])
                for alias, weight in (("wizard", 0.3), ("tools", 0.4))
            ),
        )
    assert Recipe.from_json(json.loads((out / "recipe.json").read_text())) == recipe
    assert "tokenizer_source: " in (out / "mergekit_config.yml").read_text()
    card = (out / "README.md").read_text()
    assert (f"Its tokens are those of {tokenizer}." in card) == (tokenizer != "base")


def test_the_vocabulary_is_part_of_a_recipe(models: Path) -> None:
    family = family_of(models, "wizard", "tools", tokenizer="wizard")
    bank = Bank(family, cache=models / "cache")
    plain = arithmetic(family, 0.3, 0.0)
    recipe = replace(plain, tokenizer="wizard")
    check_recipe(recipe, bank)
    assert len({replace(plain, tokenizer=name).digest for name in ("base", "union", "wizard", "tools")}) == 4
    assert set(recipe.canonical().models) == {"base", "wizard", "tools"}
    assert len({replace(family, tokenizer=name).fingerprint for name in ("base", "union", "wizard")}) == 3
    with pytest.raises(InvalidModel, match="recipe: tokenizer is 'base'; the models were opened for 'wizard'"):
        check_recipe(plain, bank)
    fewer = replace(
        recipe,
        models={a: f for a, f in recipe.models.items() if a != "tools"},
        layers=(),
        embedding=plain.canonical().embedding,
        head=plain.canonical().head,
    )
    with pytest.raises(InvalidModel, match="with tokenizer 'wizard' it must name every model; tools is missing"):
        check_recipe(fewer, bank)


# What is refused.


def test_rows_without_a_tokenizer_to_align_them_by_are_refused(models: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(models / "wizard", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    message = problems_of(models / "base", bare=bare)
    assert f"model 'bare': {bare}: has 101 rows for tokens, the base 100, and {bare} no tokenizer.json" in message
    assert f"expert 'bare': {bare}: vocab_size is 101; the base has 100" in message
    # With as many rows as the base, its tokens are taken for the base's.
    plain = shutil.copytree(models / "base", tmp_path / "plain")
    (plain / "tokenizer.json").unlink()
    resolve_family(models / "base", {"plain": plain, "wizard": models / "wizard"}, tokenizer="union")


def test_a_union_has_no_tokens_of_another_segmentation(models: Path, tmp_path: Path) -> None:
    other = shutil.copytree(models / "base", tmp_path / "other")
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["qu"] = vocabulary.pop("~")
    (other / "tokenizer.json").write_text(json.dumps(document))
    assert problems_of(models / "base", "union", other=other) == (
        f"model 'other': {other}: 1 tokens of its tokenizer's own vocabulary are not the base's ('qu'); a union can "
        "only have added ones: give base or other"
    )
    for tokenizer in ("base", "other"):
        resolve_family(models / "base", {"other": other}, tokenizer=tokenizer)
