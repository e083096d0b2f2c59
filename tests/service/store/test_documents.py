"""Tests of the stored documents."""

from __future__ import annotations

from dataclasses import replace

from service.store.documents import BenchmarkFacts

FACTS = BenchmarkFacts(
    "mmlu", "acc", "maximize", None, task_digest="a" * 64, num_samples=30, subtasks=(("law", 10), ("physics", 20))
)


def test_a_changed_benchmark_says_what_changed() -> None:
    """The message has size, metric and digest of the stored and the new task, and the names of subtasks that differ."""
    assert FACTS.change_since(replace(FACTS, template="another")) == ""
    now = replace(FACTS, task_digest="b" * 64, num_samples=45, subtasks=(("law", 25), ("physics", 20)))
    assert now.change_since(FACTS) == (
        "stored are 30 samples by acc (digest aaaaaaaaaaaa), the study file now describes 45 samples by acc (digest "
        "bbbbbbbbbbbb); subtasks that differ are law"
    )
    same_size = replace(FACTS, task_digest="b" * 64)
    assert same_size.change_since(FACTS).endswith("(digest bbbbbbbbbbbb)")
