"""Memory of the texts that transformers completes at once, and the batches that fit."""

from __future__ import annotations

from workers.engines.transformers.batches import BATCH, batch_bytes, fitting_batch

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
KV = 2 * 32 * 8 * 128 * 4  # bytes of a token's keys and values


def test_bytes_by_hand() -> None:
    """Keys and values of every token, and the activations of the prompts in one layer."""
    assert batch_bytes(LLAMA_3_8B, []) == 0
    of_prompt = 4 * (3 * 14336 + 4 * 4096 + 2 * 32 * 100)  # of each of 100 tokens
    assert batch_bytes(LLAMA_3_8B, [(100, 1400)]) == 1500 * KV + 100 * of_prompt
    assert batch_bytes(LLAMA_3_8B, [(100, 1400)] * 32) == 32 * (1500 * KV + 100 * of_prompt) > 12.5e9
    assert batch_bytes(LLAMA_3_8B, [(100, 9), (90, 1400)]) == 2 * (1500 * KV + 100 * of_prompt), "padded"


def test_batches_are_of_texts_of_similar_length() -> None:
    """More texts than a batch holds need no more memory than the batch of the longest."""
    long, short = [(500, 256)] * BATCH, [(50, 256)] * 1000
    assert batch_bytes(LLAMA_3_8B, [*long, *short]) == batch_bytes(LLAMA_3_8B, long)


def test_fitting_batches_are_halved() -> None:
    lengths = [(100, 1400)] * 32
    whole = batch_bytes(LLAMA_3_8B, lengths)
    assert fitting_batch(LLAMA_3_8B, lengths, whole) == 32
    assert fitting_batch(LLAMA_3_8B, lengths, whole - 1) == 16
    assert fitting_batch(LLAMA_3_8B, lengths, whole // 9) == 2
    assert fitting_batch(LLAMA_3_8B, lengths, 0) == fitting_batch(LLAMA_3_8B, [], 0) == 1
    assert fitting_batch(LLAMA_3_8B, lengths * 4, 10**15) == BATCH
