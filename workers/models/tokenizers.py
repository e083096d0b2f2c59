"""A model's tokenizer: loaded so that it gives the token ids of its tokenizer.json, and checked that it does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from workers.errors import InvalidModel

__all__ = ["TOKENIZER_FILES", "check_tokenizer", "load_tokenizer"]

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

# Tells apart tokenizers that treat space, newline, digits, case or non-ASCII text differently.
PROBE = "Q: 12+3=\n  Two words, then A-Z;\tend.\n\nnaïve [x]"

# Texts that tokenizers often treat differently.
PROBES = (
    "Hello world",
    " two  spaces and a tab\t.",
    "line one\nline two\n\n",
    "12+34=46",
    "caf\u00e9 \u4f60\u597d \U0001f642",
)


def load_tokenizer(directory: str) -> Any:
    """The tokenizer of a checkpoint, giving the token ids of its tokenizer.json.

    transformers chooses a class by the model's type whatever the folder says, and that class may split text in its
    own way. Where it disagrees with tokenizer.json, the plain class that only reads the file is used. Raises
    InvalidModel if there is none, or if that disagrees too. Never runs code from the folder.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InvalidModel((f"{directory}: no tokenizer can be loaded from it: {error}",)) from error
    file = Path(directory) / "tokenizer.json"
    if not file.exists():
        return tokenizer
    expected = Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids
    if tokenizer(PROBE, add_special_tokens=False)["input_ids"] == expected:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(directory, trust_remote_code=False)
    if plain(PROBE, add_special_tokens=False)["input_ids"] == expected:
        log.warning(
            "%s: %s splits text unlike tokenizer.json; used as written there", directory, type(tokenizer).__name__
        )
        return plain
    raise InvalidModel((f"{directory}: transformers and the tokenizers library read its tokenizer.json differently",))


def check_tokenizer(directory: str | Path) -> None:
    """Raise InvalidModel unless transformers' tokenizer of `directory` encodes and decodes as its tokenizer.json says.

    For some architectures transformers builds its own class, whatever the folder says, and a tokenizer of another
    kind silently loses characters. Folders without tokenizer.json are only loaded.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = Path(directory)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidModel((f"{path}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}",))
    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # bare ones too: the tokenizers library raises them for files it cannot read
        raise InvalidModel((f"{path}: its tokenizer cannot be loaded: {error}",)) from error
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    stated = Tokenizer.from_file(str(file))
    who, advice = f"transformers ({type(loaded).__name__})", "set model_type or the tokenizer files so that they agree"
    for probe in PROBES:
        got = loaded(probe, add_special_tokens=False)["input_ids"]
        ids = stated.encode(probe, add_special_tokens=False).ids
        if got != ids:
            raise InvalidModel(
                (f"{path}: {who} encodes {probe!r} as {got}, tokenizer.json as {ids}; expected the same ids: {advice}",)
            )
        decoded = loaded.decode(ids, clean_up_tokenization_spaces=False)
        text = stated.decode(ids, skip_special_tokens=False)
        if decoded != text:
            raise InvalidModel(
                (
                    f"{path}: {who} decodes {ids} as {decoded!r}, tokenizer.json as {text!r}; expected the same text: "
                    f"{advice}",
                )
            )
