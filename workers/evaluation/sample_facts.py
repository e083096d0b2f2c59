"""Facts about a task's samples that do not depend on a model: their texts and their lengths."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Item", "Lengths"]


@dataclass(frozen=True)
class Item:
    """One sample of a task: its name in the task's data, and its text, or the hash of an image."""

    name: str
    text: str


@dataclass(frozen=True)
class Lengths:
    """Mean numbers of tokens that a model reads and generates for one sample of a task.

    - `read`: the tokens that the model reads: the prompt, or all options with their prompts
    - `answered`: the tokens that the model generates if completions are as long as the reference answers; equal to
      `limit` without reference answers
    - `limit`: the tokens that the model generates if completions end only at the task's limit
    """

    read: float
    answered: float
    limit: float
