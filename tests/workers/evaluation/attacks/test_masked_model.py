import json
from pathlib import Path

import pytest
import torch

from search_spaces.study.attacks import BertAttack
from tests.builders import tiny_bert, tiny_llama
from workers.errors import InvalidModel
from workers.evaluation.attacks.masked_model import MaskedModel, _most_probable, check_masked_model
from workers.evaluation.attacks.templates import Template

TEXT = "Classify the movie review as positive: {{text}}"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def test_most_probable_sequences_are_exact() -> None:
    """The best sequences of several tokens are those of all combinations, in the order of their sums."""
    rows = torch.log_softmax(torch.randn(3, 7, generator=torch.Generator().manual_seed(1)), dim=-1)
    every = [(a, b, c) for a in range(7) for b in range(7) for c in range(7)]
    every.sort(key=lambda found: -sum(float(rows[i, token]) for i, token in enumerate(found)))
    assert _most_probable(rows, limit=20) == every[:20]


def test_proposals_are_whole_other_words(bert: Path) -> None:
    """Proposals are whole words, not the word itself, at most `limit`, and always equal."""
    model = MaskedModel(str(bert))
    text = "classify the movie review"
    words = model.proposals(text, (13, 18), limit=60)
    assert words == MaskedModel(str(bert)).proposals(text, (13, 18), limit=60)
    assert 10 < len(words) <= 60
    assert "movie" not in words
    assert all(word.isalpha() for word in words)
    assert model.proposals(text, (13, 18), limit=5) == words[: len(model.proposals(text, (13, 18), limit=5))]


def test_words_of_several_tokens_are_replaced(bert: Path) -> None:
    """A word that the vocabulary lacks is replaced by one word that may consist of several tokens."""
    words = MaskedModel(str(bert)).proposals("rate the sentiment well", (9, 18), limit=48)
    assert words
    assert all(word.isalpha() and word != "sentiment" for word in words)


def test_proposals_follow_the_text(bert: Path) -> None:
    """The model reads the text: with other words around it, other words are proposed, or in another order."""
    model = MaskedModel(str(bert))
    assert model.proposals("rate the movie", (9, 14), limit=48) != model.proposals("good bad movie", (9, 14), limit=48)


def test_a_word_that_is_cut_off_has_no_proposals(bert: Path) -> None:
    """Beyond the model's maximum length nothing is proposed."""
    text = "good " * 80
    assert MaskedModel(str(bert)).proposals(text, (395, 399), limit=5) == ()


def test_similarity_limits_words(bert: Path) -> None:
    """Words with which the template is less similar to the original than the limit are left out."""
    original = Template.of(TEXT, labels=["positive"])
    index = original.words[1]
    model = MaskedModel(str(bert))

    def words(least: float) -> tuple[str, ...]:
        option = BertAttack(kind="bert", model=str(bert), min_similarity=least)
        return model.words(original, index, original=original, option=option)

    every = words(-1.0)
    found = model.similarities([original.with_word(index, word).read() for word in every], original.read())
    limit = sorted(found)[len(found) // 2]
    assert words(limit) == tuple(word for word, each in zip(every, found, strict=True) if each >= limit)
    assert 0 < len(words(limit)) < len(every)
    assert words(1.0) == ()


def test_an_encoder_of_its_own_is_used(bert: Path, tmp_path: Path) -> None:
    """Similarities come from the encoder if one is given."""
    encoder = tiny_bert(tmp_path, seed=5)
    own = MaskedModel(str(bert)).similarities(["good movie"], "bad movie")
    other = MaskedModel(str(bert), encoder=str(encoder)).similarities(["good movie"], "bad movie")
    assert own != other
    assert MaskedModel(str(encoder)).similarities(["good movie"], "bad movie") == pytest.approx(other)
    assert own[0] < 1
    assert MaskedModel(str(bert)).similarities(["bad movie"], "bad movie") == pytest.approx([1.0])


def test_missing_model_says_where_it_was_looked_for(tmp_path: Path) -> None:
    """The message has the directory, or the name and the cache's answer."""
    with pytest.raises(InvalidModel, match=str(tmp_path / "absent")):
        check_masked_model(str(tmp_path / "absent"))


def test_another_kind_of_model_is_refused(tmp_path: Path, bert: Path) -> None:
    """A causal model fills no masks; a model without tokenizer.json cannot say which tokens a word has."""
    assert check_masked_model(str(bert)) == bert
    llama = tiny_llama(tmp_path / "llama")
    with pytest.raises(InvalidModel, match=r"is no fill-mask model \(llama with architectures LlamaForCausalLM\)"):
        check_masked_model(str(llama))
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(InvalidModel, match=r"bare: has no config\.json"):
        check_masked_model(str(bare))
    (bare / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(InvalidModel, match=r"bare: has no \*\.safetensors file"):
        check_masked_model(str(bare))
    (bare / "model.safetensors").touch()
    with pytest.raises(InvalidModel, match=r"bare: has no tokenizer\.json"):
        check_masked_model(str(bare))
