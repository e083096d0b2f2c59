"""References: the right answers of a task's samples, as tokens that a model reads instead of generating them.

A completion's reference is the task's own target after the task's own prompt. For a multiple choice all options are
read, as for scoring. Tasks without references are found without a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Continuation, Generation
from workers.evaluation.tasks import Subtask, build_task
from workers.types import TaskSpec

__all__ = ["Reading", "References", "Target", "lack_of_references", "reference_texts"]

CHECKED = 100  # documents of each subtask whose targets are checked


@dataclass(frozen=True)
class Reading:
    """Tokens to read; those after the first `num_context` are scored.

    If `ends` is not empty, one of its tokens must follow, and is scored too.
    """

    tokens: tuple[int, ...]
    num_context: int
    ends: tuple[int, ...] = ()

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_context + bool(self.ends)


@dataclass(frozen=True)
class Target:
    """The data for the loss of one sample.

    Without `scales`, `readings` are right completions; the loss is the negative log-likelihood (natural log) of the
    likeliest. With `scales`, `readings` are the options of a multiple choice; the loss is the cross-entropy, over all
    options, of the likeliest of those in `right`. An option's log-likelihood is multiplied by its scale.
    """

    readings: tuple[Reading, ...]
    right: tuple[int, ...]
    scales: tuple[float, ...] | None = None

    @property
    def size(self) -> float:
        """The unit of the loss: for a completion its mean number of scored tokens, for a multiple choice ln(options).

        The mean is over the alternative right completions.
        """
        if self.scales is not None:
            return math.log(len(self.readings))
        return sum(reading.num_scored for reading in self.readings) / len(self.readings)


class References:
    """The targets of the tasks' samples, tokenized as `evaluator` tokenizes prompts. Each is built once."""

    def __init__(self, evaluator: TaskEvaluator) -> None:
        self._evaluator = evaluator
        self._targets: dict[str, tuple[Target, ...]] = {}
        self._units: dict[str, float] = {}

    def targets(self, spec: TaskSpec) -> tuple[Target, ...]:
        """The targets by position. Raises InvalidTask if a sample has no reference."""
        known = self._targets.get(spec.digest)
        if known is None:
            positions = range(len(self._evaluator.task(spec).order))
            known = self._targets[spec.digest] = tuple(self._target(spec, position) for position in positions)
        return known

    def unit(self, spec: TaskSpec) -> float:
        """The mean `Target.size` of the task's samples.

        Losses divided by it are comparable between tasks: nats per token of an answer, or for a multiple choice 1 at
        chance level.
        """
        known = self._units.get(spec.digest)
        if known is None:
            targets = self.targets(spec)
            known = self._units[spec.digest] = sum(target.size for target in targets) / len(targets)
        return known

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> Target:
        """The target for a model's own completion of a sample, whose `tokens` include the one that ended it.

        Raises InvalidTask if the sample is a multiple choice.
        """
        (request, *_) = self._evaluator.requests(spec, position)
        if not isinstance(request, Generation):
            raise InvalidTask(f"task {spec.task}, sample {position}: its answer is an option, not a completion")
        ends = self._ends(request.stop)
        is_ended = tokens[-1] in ends  # any other end is equivalent
        scored = tokens[:-1] if is_ended else tokens
        return _alternatives([Reading((*request.tokens, *scored), len(request.tokens), ends if is_ended else ())])

    def _target(self, spec: TaskSpec, position: int) -> Target:
        built = self._evaluator.task(spec)
        subtask = built.subtasks[built.order[position][0]]
        instances = self._evaluator.instances(spec, position)
        requests = self._evaluator.requests(spec, position)
        document = instances[0].doc
        reason = _lack(subtask.task, document)
        if reason is not None:
            raise InvalidTask(f"task {subtask.name}, document {built.document(position)}: has no reference: {reason}")
        if isinstance(requests[0], Generation):
            texts = _texts(subtask.task, document)
            return _alternatives(
                [self._completion(requests[0], str(instances[0].args[0]), text, subtask.task) for text in texts]
            )
        readings = [Reading(r.tokens, r.num_context) for r in requests if isinstance(r, Continuation)]
        if subtask.task.OUTPUT_TYPE == "loglikelihood":
            return _alternatives(readings[:1])
        choices = subtask.task.doc_to_choice(document)
        return Target(
            tuple(readings[: len(choices)]), _right_options(subtask.task, document), _scales(choices, spec.metric)
        )

    def _completion(self, request: Generation, context: str, target: str, task: Any) -> Reading:
        prompts = self._evaluator.lm.prompts
        text = _delimiter(task, has_template=bool(prompts.options.chat_template)) + target
        found = [text.find(stop) for stop in request.stop if stop in text]
        if found and text[: min(found)].strip():
            text = text[: min(found)]
        before, whole = prompts.encode(context), prompts.encode(context + text)
        is_prefix = whole[: len(before)] == before
        tokens = whole[len(before) :] if is_prefix else prompts.encode(text, special_tokens=False)
        ends = () if len(tokens) >= request.max_tokens else self._ends(request.stop)
        return Reading((*request.tokens, *tokens[: request.max_tokens]), len(request.tokens), ends)

    def _ends(self, stops: Sequence[str]) -> tuple[int, ...]:
        """The tokens any of which ends a completion: end of text, and stop strings that are one token."""
        prompts = self._evaluator.lm.prompts
        encoded = [prompts.encode(stop, special_tokens=False) for stop in stops]
        return tuple(sorted({*prompts.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)}))


def lack_of_references(spec: TaskSpec) -> str | None:
    """Why the task's samples have no references for teacher forcing; None if they have.

    Looks at some samples, without a tokenizer. Raises InvalidTask as `tasks.check_task`, which also refuses tasks that
    execute code.
    """
    for subtask in build_task(spec).subtasks:
        if reason := _lack_of_some(subtask):
            return f"task {subtask.name}: {reason}"
    return None


def reference_texts(task: Any, document: Any) -> tuple[str, ...]:
    """The right answers of a document of a generating lm-eval task; none if it has no reference."""
    return () if _lack(task, document) else tuple(_texts(task, document))


def _lack_of_some(subtask: Subtask) -> str | None:
    documents = (subtask.task.eval_docs[i] for i in range(min(CHECKED, subtask.num_samples)))
    return next((reason for document in documents if (reason := _lack(subtask.task, document))), None)


def _lack(task: Any, document: Any) -> str | None:
    """Why a document has no reference; None if it has one."""
    try:
        if task.OUTPUT_TYPE == "multiple_choice":
            if not _right_options(task, document):
                return "its target names none of the options"
            return None if len(task.doc_to_choice(document)) > 1 else "it has a single option"
        if task.OUTPUT_TYPE == "loglikelihood":
            return None
        if isinstance(task.config.doc_to_target, int) and task.config.doc_to_choice is None:
            return f"its target is the number {task.config.doc_to_target}, not an answer"
        texts = _texts(task, document)
    except Exception as error:  # a task is code and templates of any origin
        return f"its target cannot be read: {type(error).__name__}: {error}"
    if not texts:
        return "its target is an empty list"
    return None if all(text.strip() for text in texts) else "its target is an empty text"


def _texts(task: Any, document: Any) -> list[str]:
    """The right answers of a generating task, as lm-eval compares completions with them."""
    target = task.doc_to_target(document)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(document)[target]
    each = target if isinstance(target, list | tuple) and task.multiple_target else [target]
    if unknown := [value for value in each if not isinstance(value, str | int | float)]:
        raise TypeError(f"{unknown[0]!r} is no text")
    return list(dict.fromkeys(map(str, each)))


def _right_options(task: Any, document: Any) -> tuple[int, ...]:
    """The indices of the right options, as lm-eval judges them."""
    options = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    each = gold if isinstance(gold, list) else [gold]
    indices = [options.index(g) if isinstance(g, str) and g in options else g for g in each]
    return tuple(i for i in indices if isinstance(i, int) and 0 <= i < len(options))


def _scales(options: Sequence[str], metric: str) -> tuple[float, ...]:
    """The factors of the options' log-likelihoods.

    A metric that divides by lengths has the mean length over each length, any other metric 1.
    """
    if metric == "acc_norm":
        lengths = [max(1, len(option)) for option in options]
    elif metric == "acc_bytes":
        lengths = [max(1, len(option.encode())) for option in options]
    else:
        return (1.0,) * len(options)
    mean = sum(lengths) / len(lengths)
    return tuple(mean / length for length in lengths)


def _alternatives(readings: Sequence[Reading]) -> Target:
    return Target(tuple(readings), tuple(range(len(readings))))


def _delimiter(task: Any, *, has_template: bool) -> str:
    """The text that lm-eval puts between a prompt and its answer; empty after a chat template."""
    prefix = task.config.gen_prefix
    if has_template and not (prefix and not str(prefix)[-1:].isspace()):
        return ""
    return str(task.config.target_delimiter)
