"""Models with other tokens, converted to the tokens of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.builders import byte_tokenizer, character_tokenizer
from tests.workers.export.expansion.test_expansion import WIDE, build
from workers.export.expansion.files import expand
from workers.export.expansion.tokens import Rows, Tokens, rows_for
from workers.models.checkpoints import open_checkpoint
from workers.models.family import resolve_family
from workers.models.tokenizers import load_tokenizer

TEXT = "lookup 12 of x3?"


def piece_tokenizer() -> Any:
    """A tokenizer whose tokens have a mark for spaces, and tokens for single bytes."""
    tokens = ["<s>", "</s>", "<0x0A>", "\u2581the", "\u2581", "a", "b", "ab", "t", "h", "e"]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[("a", "b")]))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def pieces(tmp_path: Path) -> Tokens:
    piece_tokenizer().save_pretrained(tmp_path / "pieces")
    return Tokens.of(tmp_path / "pieces")


def test_tokens_correspond_by_the_bytes_of_their_texts(pieces: Tokens, tmp_path: Path) -> None:
    assert pieces.texts[2] == b"\n"
    assert pieces.texts[3] == b" the"
    assert pieces.roles == {"bos_token_id": 0, "eos_token_id": 1}
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    of_bytes = Tokens.of(tmp_path / "bytes")
    tokenizer = load_tokenizer(tmp_path / "bytes")
    for number in (*range(256), *range(len(tokenizer))):
        if number not in of_bytes.special:
            assert of_bytes.texts[number].decode("utf-8", errors="replace") == tokenizer.decode([number])
    rows = rows_for(pieces, of_bytes, 11)
    (newline,) = rows.sources[2]
    assert of_bytes.texts[newline] == b"\n"
    assert b"".join(of_bytes.texts[number] for number in rows.sources[3]) == b" the"
    assert rows.sources[1] == (of_bytes.roles["eos_token_id"],)


def test_a_text_is_divided_into_the_longest_tokens(pieces: Tokens) -> None:
    assert pieces.pieces(b" theab") == [3, 7]
    assert pieces.pieces(b" th?e") == [4, 8, 9, 10]
    assert pieces.pieces(b"</s>") == []


def test_special_tokens_correspond_by_name_before_role() -> None:
    """A token with several roles has the row of the same token, or of that with its first role: the end of a text."""
    chat = Tokens({0: b"<end>", 1: b"a"}, frozenset({0}), {"eos_token_id": 0, "pad_token_id": 0, "unk_token_id": 0})
    same = Tokens({5: b"<pad>", 6: b"<end>"}, frozenset({5, 6}), {"eos_token_id": 6, "pad_token_id": 5})
    other = Tokens({3: b"<pad>", 4: b"</s>", 7: b"?"}, frozenset({3, 4, 7}), {"eos_token_id": 4, "unk_token_id": 7})
    assert rows_for(chat, same, 1).sources == ((6,),)
    assert rows_for(chat, other, 1).sources == ((4,),)


def test_rows_are_copies_or_means() -> None:
    matrix = torch.arange(8.0).view(4, 2).to(torch.bfloat16)
    found = Rows(((2,), (0, 3), ()), 1).of(matrix)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[4, 5], [3, 4], [3, 4]]


def test_a_converted_model_computes_the_same_on_common_tokens(tmp_path: Path) -> None:
    """Characters are tokens of both models; the model that reads bytes gets the other's ids and special tokens."""
    given = {
        "characters": build(tmp_path / "characters", "llama", WIDE, tokenizer=character_tokenizer()),
        "bytes": build(tmp_path / "bytes", "qwen2", WIDE, tokenizer=byte_tokenizer()),
    }
    notes: list[str] = []
    found = expand(given, tmp_path / "out", tokens_of="characters", note=notes.append)
    assert notes[-1].startswith("bytes: has ")
    converted = found.directories["bytes"]
    assert (converted / "tokenizer.json").read_text() == (given["characters"] / "tokenizer.json").read_text()
    tokenizer = {name: load_tokenizer(given[name]) for name in given}
    assert found.form.shape.vocabulary == len(tokenizer["characters"])
    ids = {
        name: [tokenizer[name].convert_tokens_to_ids(character.replace(" ", "\u0120" if name == "bytes" else " "))
               for character in TEXT]
        for name in given
    }  # fmt: skip
    own, after = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for directory in (given["bytes"], converted)
    )
    with torch.no_grad():
        expected = own(torch.tensor([ids["bytes"]])).logits[0][:, ids["bytes"]]
        logits = after(torch.tensor([ids["characters"]])).logits[0][:, ids["characters"]]
    assert torch.allclose(logits, expected, atol=1e-4 * float(expected.abs().max()))
    settings = open_checkpoint(converted).settings
    assert settings["eos_token_id"] == open_checkpoint(given["characters"]).settings["eos_token_id"]
    resolve_family(found.directories["characters"], {"bytes": converted})
