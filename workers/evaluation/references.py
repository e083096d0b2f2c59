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
    """A text for a model to read: the tokens of a prompt followed by an answer.

    Its log-likelihood is that of the tokens after the first `num_context`. If `ends` is not empty, the text is followed
    by any one of these tokens, whose likelihood counts too.
    """

    tokens: tuple[int, ...]
    num_context: int
    ends: tuple[int, ...] = ()

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_context + bool(self.ends)


@dataclass(frozen=True)
class Target:
    """What the loss of one sample is computed from: texts that a model reads, and which of them are right.

    If `scales` is None, `readings` are alternative right completions; the loss is the negative log-likelihood (natural
    log) of the most likely one. Otherwise `readings` are the options of a multiple choice, and `right` has the indices
    of the right ones. Then the loss is the cross-entropy, over all options, of the most likely right option; an
    option's log-likelihood is multiplied by its scale.
    """

    readings: tuple[Reading, ...]
    right: tuple[int, ...]
    scales: tuple[float, ...] | None = None

    @property
    def size(self) -> float:
        """The unit by which the loss of this sample is divided to make tasks comparable.

        For a completion it is the number of scored tokens (the mean over alternative right completions), for a multiple
        choice the natural logarithm of the number of options.
        """
        if self.scales is not None:
            return math.log(len(self.readings))
        return sum(reading.num_scored for reading in self.readings) / len(self.readings)


class References:
    """What the losses of tasks' samples are computed from (`Target`): the samples' right answers, tokenized.

    `evaluator` provides the tokenized prompts. The targets of a task are built once.
    """

    def __init__(self, evaluator: TaskEvaluator) -> None:
        self._evaluator = evaluator
        self._targets: dict[str, tuple[Target, ...]] = {}
        self._units: dict[str, float] = {}

    def targets(self, spec: TaskSpec) -> tuple[Target, ...]:
        """For each sample of a task, by position, the texts from which its loss is computed (`Target`).

        Raises InvalidTask if a sample has no right answer that a model could read.
        """
        known = self._targets.get(spec.digest)
        if known is None:
            positions = range(len(self._evaluator.task(spec).order))
            known = self._targets[spec.digest] = tuple(self._target(spec, position) for position in positions)
        return known

    def unit(self, spec: TaskSpec) -> float:
        """The mean `Target.size` of a task's samples, by which the task's losses are divided.

        The quotients are comparable between tasks: nats per token of an answer, or for a multiple choice 1 at chance
        level.
        """
        known = self._units.get(spec.digest)
        if known is None:
            targets = self.targets(spec)
            known = self._units[spec.digest] = sum(target.size for target in targets) / len(targets)
        return known

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> Target:
        """The `Target` of a sample with a model's own completion in place of the right answer.

        `tokens` include the token that ended the completion. Raises InvalidTask if the sample is a multiple choice.
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
        """The ids of all tokens that end a completion, sorted.

        They are the end-of-text tokens, and those of the task's stop strings (`stops`) that are a single token.
        """
        prompts = self._evaluator.lm.prompts
        encoded = [prompts.encode(stop, special_tokens=False) for stop in stops]
        return tuple(sorted({*prompts.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)}))


def lack_of_references(spec: TaskSpec) -> str | None:
    """The reason why a task's samples have no right answers that a model could read; None if they have.

    Only some samples are checked, without a tokenizer. Raises InvalidTask in the cases of `tasks.check_task`, for
    example if the task executes code.
    """
    for subtask in build_task(spec).subtasks:
        if reason := _lack_of_some(subtask):
            return f"task {subtask.name}: {reason}"
    return None


def reference_texts(task: Any, document: Any) -> tuple[str, ...]:
    """The right answers of a document of a generating lm-eval task, as texts; empty if it has none."""
    return () if _lack(task, document) else tuple(_texts(task, document))


def _lack_of_some(subtask: Subtask) -> str | None:
    documents = (subtask.task.eval_docs[i] for i in range(min(CHECKED, subtask.num_samples)))
    return next((reason for document in documents if (reason := _lack(subtask.task, document))), None)


def _lack(task: Any, document: Any) -> str | None:
    """The reason why a document has no right answer that a model could read; None if it has one.

    A multiple choice needs a right one among several options. A generating task needs a target that is a text, or a
    list of texts, none of them empty.
    """
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
    """The right answers of a document of a generating task, as the texts that lm-eval compares completions with.

    Raises TypeError for an answer that is neither text nor a number.
    """
    target = task.doc_to_target(document)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(document)[target]
    each = target if isinstance(target, list | tuple) and task.multiple_target else [target]
    if unknown := [value for value in each if not isinstance(value, str | int | float)]:
        raise TypeError(f"{unknown[0]!r} is no text")
    return list(dict.fromkeys(map(str, each)))


def _right_options(task: Any, document: Any) -> tuple[int, ...]:
    """The indices, from 0, of the options of a multiple choice that lm-eval counts as right.

    Indices that the document states and that no option has are left out.
    """
    options = task.doc_to_choice(document)
    gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    each = gold if isinstance(gold, list) else [gold]
    indices = [options.index(g) if isinstance(g, str) and g in options else g for g in each]
    return tuple(i for i in indices if isinstance(i, int) and 0 <= i < len(options))


def _scales(options: Sequence[str], metric: str) -> tuple[float, ...]:
    """The factor for the log-likelihood of each option of a multiple choice, as `metric` compares options.

    For a metric that divides by lengths (acc_norm, acc_bytes) it is the mean length of the options divided by the
    option's length; for any other metric it is 1.
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
    """The text that lm-eval puts between a prompt and its answer: the task's delimiter, or "" after a chat template.

    `has_template` says whether the prompt is rendered by a chat template. The delimiter is also used after a chat
    template if the task itself begins the answer (`gen_prefix`) with a text that does not end in white space.
    """
    prefix = task.config.gen_prefix
    if has_template and not (prefix and not str(prefix)[-1:].isspace()):
        return ""
    return str(task.config.target_delimiter)
