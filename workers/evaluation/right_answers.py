"""The right answers of a document, as its lm-eval task states them: texts, or options of a multiple choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RightAnswer", "right_answer"]


@dataclass(frozen=True)
class RightAnswer:
    """The right answers of one document: texts, or options of a multiple choice.

    - `lack`: the reason why no loss can be computed on the right answers; None if a loss can be computed
    - `texts`: for a generating task, the alternative right answers
    - `options`: the options of a multiple choice
    - `right`: the indices of the right options
    """

    lack: str | None
    texts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    right: tuple[int, ...] = ()


def right_answer(task: Any, document: Any) -> RightAnswer:
    """The right answers of a document of an lm-eval task.

    If losses cannot be computed on the right answers, the result has the reason (field `RightAnswer.lack`). A multiple
    choice needs a right option among several options. A generating task needs a target that is a text or a list of
    texts; no text may be empty.
    """
    try:
        if task.OUTPUT_TYPE == "multiple_choice":
            options, right = tuple(task.doc_to_choice(document)), _right_options(task, document)
            if not right:
                return RightAnswer("its target names none of the options")
            return RightAnswer(None if len(options) > 1 else "it has a single option", (), options, right)
        if task.OUTPUT_TYPE == "loglikelihood":
            return RightAnswer(None)
        if isinstance(task.config.doc_to_target, int) and task.config.doc_to_choice is None:
            return RightAnswer(f"its target is the number {task.config.doc_to_target}, not an answer")
        texts = _texts(task, document)
    except Exception as error:  # a task is code and templates of any origin
        return RightAnswer(f"its target cannot be read: {type(error).__name__}: {error}")
    if not texts:
        return RightAnswer("its target is an empty list")
    return (
        RightAnswer(None, texts) if all(text.strip() for text in texts) else RightAnswer("its target is an empty text")
    )


def _texts(task: Any, document: Any) -> tuple[str, ...]:
    """Right answers of a generating task's document, as texts that lm-eval compares with completions.

    Raises TypeError for an answer that is neither text nor a number.
    """
    target = task.doc_to_target(document)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(document)[target]
    each = target if isinstance(target, list | tuple) and task.multiple_target else [target]
    if unknown := [value for value in each if not isinstance(value, str | int | float)]:
        raise TypeError(f"{unknown[0]!r} is no text")
    return tuple(dict.fromkeys(map(str, each)))


def _right_options(task: Any, document: Any) -> tuple[int, ...]:
    """The indices, from 0, of the right options of a multiple choice, according to lm-eval.

    `task` is lm-eval's task object, and `document` is one of its samples. Indices in the document that are not the
    index of an option are left out.
    """
    options = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    each = gold if isinstance(gold, list) else [gold]
    indices = [options.index(g) if isinstance(g, str) and g in options else g for g in each]
    return tuple(i for i in indices if isinstance(i, int) and 0 <= i < len(options))
