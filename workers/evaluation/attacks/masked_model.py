"""Replacement words from a local fill-mask model (BERT-Attack), and the similarity of templates by an encoder.

BERT-Attack (Li et al., 2020, "BERT-ATTACK: Adversarial Attack Against BERT Using BERT", section 3.2) reads the text
without a mask and takes the tokens that the model finds most probable at the place of the word. A word of several
tokens is replaced by the combinations of tokens that are most probable together.

Departure from PromptBench: the similarity of two texts is the cosine of the mean final states of a local encoder, by
default the fill-mask model itself. PromptBench uses the Universal Sentence Encoder, which is a TensorFlow model of a
hub. So an equal `min_similarity` is not the same limit here and in PromptBench.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.study.attacks import BertAttack
from workers.errors import InvalidModel
from workers.evaluation.attacks.templates import Template, is_word
from workers.models.remote import fetched, locate
from workers.models.tokenizers import load_tokenizer

if TYPE_CHECKING:
    import torch

__all__ = ["MaskedModel", "check_masked_model"]


def check_masked_model(model: str, *, is_encoder: bool = False) -> Path:
    """Check the files of a fill-mask model or an encoder without loading weights, and return its directory.

    `model` is a directory, a hub id or a URL. With `is_encoder` the model need not be a fill-mask model. Raises
    InvalidModel if the model does not exist or is of another kind. If it does not exist, the message names the places
    where it was looked for.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    directory = locate(model)
    try:
        config = json.loads((directory / "config.json").read_text())
        kind = str(config["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidModel((f"{directory}: has no config.json that names a model_type: {error}",)) from error
    if not any(directory.glob("*.safetensors")):
        raise InvalidModel((f"{directory}: has no *.safetensors file; weights are read only from these",))
    if not (directory / "tokenizer.json").is_file():
        raise InvalidModel((f"{directory}: has no tokenizer.json, which maps words to tokens",))
    if is_encoder:
        return directory
    names = tuple(map(str, config.get("architectures") or ()))
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or not any(name.endswith("MaskedLM") for name in names):
        found = f"{kind} with architectures {', '.join(names) or 'not stated'}"
        raise InvalidModel(
            (f"{directory}: is no fill-mask model ({found}); give one such as BERT, of an architecture ...ForMaskedLM",)
        )
    return directory


class MaskedModel:
    """A fill-mask model and a sentence encoder, loaded at first use, in float32 on the CPU.

    `model` names the fill-mask model, and `encoder` names the encoder; by default the encoder is the fill-mask model
    without its head. Texts longer than a model's maximum length are cut at their end.
    """

    def __init__(self, model: str, *, encoder: str | None = None) -> None:
        self._model_name = model
        self._encoder_name = encoder or model

    def words(self, current: Template, index: int, *, original: Template, option: BertAttack) -> tuple[str, ...]:
        """Words that may replace one word of the prompt template `current`, the most probable first.

        A template consists of pieces (words, placeholders, other text), and the word is the piece `index`. `current`
        was made from `original` by earlier changes. The result contains at most `option.candidates` words. With each of
        them, the template's similarity to `original` is at least `option.min_similarity`.
        """
        words = self.proposals(current.read(), current.span(index), limit=option.candidates)
        if not words:
            return ()
        similar = self.similarities([current.with_word(index, word).read() for word in words], original.read())
        return tuple(word for word, found in zip(words, similar, strict=True) if found >= option.min_similarity)

    def proposals(self, text: str, span: tuple[int, int], *, limit: int) -> tuple[str, ...]:
        """Words that the fill-mask model finds likely in place of a part of `text`, the most probable first.

        `span` is the part: (index of its first character, index after its last character). The words come from the
        `limit` most probable token sequences. Only whole words that differ from the word in the text are proposed. A
        text that is longer than the model's maximum length is cut; if the part is in the end that is cut off, the
        result is empty.
        """
        import torch

        encoded = _encoded(self._tokenizer, self._model, [text], return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        places = [i for i, (start, stop) in enumerate(offsets) if start < span[1] and span[0] < stop]
        if not places:
            return ()
        with torch.inference_mode():
            logits = self._model(**encoded).logits[0, places].double()
        log_probabilities = torch.log_softmax(logits, dim=-1)
        old = self._text(encoded["input_ids"][0, places].tolist())
        found: dict[str, None] = {}
        for tokens in _most_probable(log_probabilities, limit=limit):
            new = self._text(tokens)
            word = new.strip()
            # A token that continues a word has "##" before it, or no space where the old word has one.
            if is_word(word) and new[:1].isspace() == old[:1].isspace() and word.lower() != old.strip().lower():
                found.setdefault(word)
        return tuple(found)

    def similarities(self, texts: Sequence[str], to: str) -> tuple[float, ...]:
        """The cosine similarity of each of `texts` to the text `to`, in [-1, 1]."""
        import torch

        states = self._mean_states([to, *texts])
        return tuple(torch.cosine_similarity(states[1:], states[:1]).tolist())

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _mean_states(self, texts: Sequence[str]) -> torch.Tensor:
        import torch

        encoded = _encoded(self._encoder_tokenizer, self._encoder, texts, padding=True)
        with torch.inference_mode():
            states = self._encoder(**encoded).last_hidden_state.double()
        mask = encoded["attention_mask"].unsqueeze(-1)
        means: torch.Tensor = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return means

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._directory(self._model_name))

    @cached_property
    def _encoder_tokenizer(self) -> Any:
        if self._encoder_name == self._model_name:
            return self._tokenizer
        return load_tokenizer(self._directory(self._encoder_name))

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForMaskedLM

        return _loaded(AutoModelForMaskedLM, self._directory(self._model_name))

    @cached_property
    def _encoder(self) -> Any:
        from transformers import AutoModel

        if self._encoder_name == self._model_name:
            return self._model.base_model
        return _loaded(AutoModel, self._directory(self._encoder_name))

    @staticmethod
    def _directory(name: str) -> Path:
        return fetched((locate(name),))[0]


def _encoded(tokenizer: Any, model: Any, texts: Sequence[str], **options: Any) -> Any:
    """The token ids of texts, cut to the maximum length of `model`, as tensors [num_texts, num_tokens].

    `tokenizer` is the model's tokenizer, which is called with the further `options`.
    """
    # Some tokenizers state no maximum. Two positions fewer than the model has are right for RoBERTa's, too.
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 514) - 2)
    return tokenizer(list(texts), return_tensors="pt", truncation=True, max_length=longest, **options)


def _loaded(kind: Any, directory: Path) -> Any:
    """Load a model from a directory, with the class `kind` of transformers.

    No code from the directory is run, and nothing is unpickled. Raises InvalidModel if the model's files cannot be
    read.
    """
    import torch

    try:
        model = kind.from_pretrained(directory, trust_remote_code=False, use_safetensors=True, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidModel((f"{directory}: cannot be loaded: {str(error).splitlines()[0]}",)) from error
    return model.eval()


def _most_probable(log_probabilities: torch.Tensor, *, limit: int) -> list[tuple[int, ...]]:
    """The most probable token sequences with one token for each position, the most probable first.

    `log_probabilities` has the shape [num_places, vocabulary]. The logarithm of a sequence's probability is the sum of
    its tokens' log-probabilities. At most `limit` sequences are returned. Sequences are built position by position from
    the `limit` best prefixes, because no other prefix can lead to one of the best sequences.
    """
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for row in log_probabilities:
        values, tokens = row.topk(min(limit, len(row)))
        pairs = list(zip(values.tolist(), tokens.tolist(), strict=True))
        longer = ((total + value, (*start, token)) for total, start in best for value, token in pairs)
        best = heapq.nlargest(limit, longer, key=lambda found: (found[0], tuple(-token for token in found[1])))
    return [tokens for _, tokens in best]
