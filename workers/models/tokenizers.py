"""Loading of tokenizers, so that they encode and decode as their tokenizer.json defines.

Preflight, engines, the comparison with transformers, and exports all load tokenizers with this module.
"""

from __future__ import annotations

import hashlib
import json
import logging
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workers.cache import cached
from workers.errors import InvalidModel

__all__ = ["TOKENIZER_FILES", "check_tokenizer", "load_tokenizer", "stated_directory", "tokenizer_digest"]

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

# Suffixes of the files that determine how transformers loads a tokenizer: those above, config.json, chat templates.
STATED_IN = (".jinja", ".json", ".model", ".tiktoken", ".txt")

# Texts that tokenizers often treat differently: space, newline, digits, case, non-ASCII text.
PROBES = (
    "Hello world",
    " two  spaces and a tab\t.",
    "line one\nline two\n\n",
    "12+34=46",
    "caf\u00e9 \u4f60\u597d \U0001f642",
    "Q: 12+3=\n  Two words, then A-Z;\tend.\n\nna\u00efve [x]",
)


def load_tokenizer(directory: str | Path) -> Any:
    """Load a checkpoint's tokenizer so that it encodes and decodes as its tokenizer.json defines.

    transformers chooses a tokenizer class by the model's type, and this class may split or join text in its own way. If
    the class disagrees with tokenizer.json, the plain class that only reads this file is used, with a warning. For a
    directory without tokenizer.json, transformers makes the tokenizer from the other files. Raises InvalidModel if
    there is no tokenizer, or if the plain class also disagrees. The function never runs code from the directory.
    """
    path = Path(directory)
    tokenizer, difference = _found(path)
    _warn(path, difference)
    return tokenizer


def check_tokenizer(directory: str | Path, *, cache: str | Path | None = None) -> tuple[str, ...]:
    """Check that a checkpoint's tokenizer can be loaded, and return the names of its chat templates.

    A single template is called "default". Logs a warning if the tokenizer class that transformers chooses disagrees
    with tokenizer.json. Raises InvalidModel if no tokenizer can be loaded that agrees. Results are cached on disk by
    the contents of the files, because importing transformers' tokenizers takes seconds. `cache` is the directory of the
    cache, or None for the default directory.
    """
    path = Path(directory)
    key = f"tokenizer {tokenizer_digest(path)}"
    if (record := cached(key, cache=cache)) is not None:
        difference, names = json.loads(record)
    else:
        tokenizer, difference = _found(path)
        templates = tokenizer.chat_template  # one, or several by name
        names = list(templates) if isinstance(templates, dict) else ["default"] if templates else []
        cached(key, json.dumps([difference, names]), cache=cache)
    _warn(path, difference)
    return tuple(names)


def tokenizer_digest(directory: str | Path) -> str:
    """Digest (sha256, hex) of the files of the tokenizer in `directory`, and of the libraries that load it.

    The digest covers the names and contents of all files from which a tokenizer may be loaded, and the libraries'
    versions. Raises InvalidModel for a file that cannot be read.
    """
    path = Path(directory)
    versions = (f"{name} {version(name)}" for name in ("transformers", "tokenizers"))
    digest = hashlib.sha256(" ".join(versions).encode())
    files = [*path.glob("*"), *path.glob("additional_chat_templates/*")]
    for file in sorted(file for file in files if file.suffix in STATED_IN and file.is_file()):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InvalidModel((f"{file}: cannot be read ({error.strerror})",)) from error
        digest.update(f"{file.relative_to(path)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _warn(path: Path, difference: str) -> None:
    if difference:
        log.warning("%s: %s; the tokenizer is used as tokenizer.json says", path, difference)


def _found(path: Path) -> tuple[Any, str]:
    """Load the tokenizer in the directory `path`, with a class of transformers that agrees with tokenizer.json.

    Returns the tokenizer and a text. If the class that transformers chooses by default does not agree, the plain class
    that only reads tokenizer.json is used, and the text says how the default differs. Otherwise the text is "". Raises
    InvalidModel if there is no tokenizer, or if the plain class also disagrees.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidModel((f"{path}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}",))
    tokenizer = _loaded("AutoTokenizer", path)
    difference = _difference(tokenizer, path)
    if not difference:
        return tokenizer, ""
    plain = _loaded("PreTrainedTokenizerFast", path)
    if remaining := _difference(plain, path):
        raise InvalidModel((f"{path}: {remaining}; expected the same: correct the tokenizer files",))
    return plain, difference


def stated_directory(directory: str | Path, tokenizer: Any) -> TemporaryDirectory[str] | None:
    """Temporary directory from which AutoTokenizer loads the same tokenizer as the function `load_tokenizer`.

    The directory is for programs that load the tokenizer themselves. `tokenizer` is the result of the function
    `load_tokenizer` for `directory`; the files in the temporary directory name its class. Returns None if no temporary
    directory is needed, because AutoTokenizer loads the same class from `directory`.
    """
    if type(_loaded("AutoTokenizer", Path(directory))) is type(tokenizer):
        return None
    made = TemporaryDirectory(prefix="mergesearch-tokenizer-")
    tokenizer.save_pretrained(made.name)
    return made


def _loaded(name: str, path: Path) -> Any:
    """Load the tokenizer in the directory `path` with the class of transformers that is called `name`."""
    import transformers

    try:
        return getattr(transformers, name).from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # bare ones too: the tokenizers library raises them for files it cannot read
        raise InvalidModel((f"{path}: its tokenizer cannot be loaded: {error}",)) from error


def _difference(tokenizer: Any, path: Path) -> str:
    """Describe the first difference of `tokenizer` from tokenizer.json in `path`; "" if there is none.

    The texts in PROBES are encoded and decoded by `tokenizer` and by the tokenizer that tokenizer.json defines, and the
    results are compared. The result is also "" if there is no tokenizer.json.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        return ""
    stated, who = Tokenizer.from_file(str(file)), f"transformers ({type(tokenizer).__name__})"
    for probe in PROBES:
        ids = stated.encode(probe, add_special_tokens=False).ids
        if (got := tokenizer(probe, add_special_tokens=False)["input_ids"]) != ids:
            return f"{who} encodes {probe!r} as {got}, tokenizer.json as {ids}"
        text = stated.decode(ids, skip_special_tokens=False)
        if (decoded := tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != text:
            return f"{who} decodes {ids} as {decoded!r}, tokenizer.json as {text!r}"
    return ""
