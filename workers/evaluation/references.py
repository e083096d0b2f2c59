"""References: the right answers of a task's samples, as tokens for computing a model's loss.

The reference of a generating task is the task's target, after the task's prompt. For a multiple choice the model reads
all options, as for scoring. Whether a task has references can be checked without a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workers.errors import InvalidTask
from workers.evaluation import built_tasks
from workers.evaluation.built_tasks import Subtask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Continuation, Generation
from workers.evaluation.task_reader import reader_of
from workers.evaluation.tasks import build_task
from workers.types import TaskSpec

__all__ = ["Reading", "References", "Target", "lack_of_entropy", "lack_of_references", "lack_of_right_answers"]

CHECKED = 100  # documents of each subtask whose targets are checked


@dataclass(frozen=True)
class Reading:
    """A text for computing a model's log-likelihood: the tokens of a prompt, followed by an answer.

    The answer begins after the first `num_context` tokens, and its log-likelihood is computed. If `ends` is not empty,
    the probability that the next token is one of `ends` is multiplied in.
    """

    tokens: tuple[int, ...]
    num_context: int
    ends: tuple[int, ...] = ()

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_context + bool(self.ends)


@dataclass(frozen=True)
class Target:
    """The texts whose log-likelihoods give the loss of one sample.

    If `scales` is None, `readings` are alternative right completions; the loss is the negative log-likelihood (natural
    log) of the most likely completion. Otherwise `readings` are the options of a multiple choice, `right` has the
    indices of the right options, and `scales` has a factor for each option's log-likelihood. Then the loss is the
    cross-entropy, over all options, of the most likely right option.
    """

    readings: tuple[Reading, ...]
    right: tuple[int, ...]
    scales: tuple[float, ...] | None = None

    @property
    def size(self) -> float:
        """Divisor that makes the loss of this sample comparable with losses on other tasks.

        For a completion the divisor is the number of scored tokens, or its mean over alternative right completions. For
        a multiple choice it is the natural logarithm of the number of options.
        """
        if self.scales is not None:
            return math.log(len(self.readings))
        return sum(reading.num_scored for reading in self.readings) / len(self.readings)


class References:
    """The tokenized right answers of tasks' samples, for computing losses (class `Target`).

    `evaluator` provides the tokenized prompts. The targets of a task are built once.
    """

    def __init__(self, evaluator: TaskEvaluator) -> None:
        self._evaluator = evaluator
        self._targets: dict[str, tuple[Target, ...]] = {}
        self._units: dict[str, float] = {}

    def targets(self, spec: TaskSpec) -> tuple[Target, ...]:
        """Texts for computing the loss of each sample of the task `spec`, in scoring order.

        Raises InvalidTask if a sample has no right answer that a model could read.
        """
        known = self._targets.get(spec.digest)
        if known is None:
            positions = range(len(self._evaluator.task(spec).order))
            known = self._targets[spec.digest] = tuple(self._target(spec, position) for position in positions)
        return known

    def unit(self, spec: TaskSpec) -> float:
        """Divisor that makes losses on the task `spec` comparable with losses on other tasks.

        The number is the mean size of the task's samples (property `Target.size`). After the division, losses on
        completions are in nats per token of an answer. Losses on a multiple choice are 1 at chance level.
        """
        known = self._units.get(spec.digest)
        if known is None:
            targets = self.targets(spec)
            known = self._units[spec.digest] = sum(target.size for target in targets) / len(targets)
        return known

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> Target:
        """The texts for a sample's loss if a model's completion counts as the right answer.

        `position` is the sample's index in the order in which the samples of the task `spec` are scored. `tokens` is
        the completion, with the token that ended it. Raises InvalidTask if the sample is a multiple choice.
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
        requests = self._evaluator.requests(spec, position)
        document = self._evaluator.document(spec, position)
        right = document.right()
        if right.lack is not None:
            raise InvalidTask(
                f"task {subtask.name}, document {built.document(position)}: has no reference: {right.lack}"
            )
        if isinstance(requests[0], Generation):
            context = str(document.instances[0].args[0])
            return _alternatives([self._completion(requests[0], context, text, subtask) for text in right.texts])
        readings = [Reading(r.tokens, r.num_context) for r in requests if isinstance(r, Continuation)]
        if subtask.output_type == "loglikelihood":
            return _alternatives(readings[:1])
        return Target(tuple(readings[: len(right.options)]), right.right, _scales(right.options, spec.metric))

    def _completion(self, request: Generation, context: str, target: str, subtask: Subtask) -> Reading:
        prompts = self._evaluator.lm.prompts
        text = subtask.delimiter_before_answer(has_template=bool(prompts.options.chat_template)) + target
        found = [text.find(stop) for stop in request.stop if stop in text]
        if found and text[: min(found)].strip():
            text = text[: min(found)]
        before, whole = prompts.encode(context), prompts.encode(context + text)
        is_prefix = whole[: len(before)] == before
        tokens = whole[len(before) :] if is_prefix else prompts.encode(text, special_tokens=False)
        ends = () if len(tokens) >= request.max_tokens else self._ends(request.stop)
        return Reading((*request.tokens, *tokens[: request.max_tokens]), len(request.tokens), ends)

    def _ends(self, stops: Sequence[str]) -> tuple[int, ...]:
        """Sorted ids of all tokens that end a completion of a task.

        They are the end-of-text tokens, and each of the task's stop strings (`stops`) that is a single token.
        """
        prompts = self._evaluator.lm.prompts
        encoded = [prompts.encode(stop, special_tokens=False) for stop in stops]
        return tuple(sorted({*prompts.stop_token_ids, *(ids[0] for ids in encoded if len(ids) == 1)}))


def lack_of_references(spec: TaskSpec) -> str | None:
    """Reason why no loss can be computed on the right answers of the task `spec`; None if a loss can be computed.

    Only the first samples are checked, and no tokenizer is needed. Raises InvalidTask if the task cannot be built or
    scored (function `tasks.check_task`).
    """
    return reader_of(spec.task).lack_of_references(spec)


def lack_of_entropy(spec: TaskSpec) -> str | None:
    """Reason why the entropy of predictions on the task `spec` cannot be computed; None if it can be computed."""
    return reader_of(spec.task).lack_of_entropy(spec)


def lack_of_right_answers(spec: TaskSpec) -> str | None:
    """Reason why no loss can be computed on the right answers of a text task; None if a loss can be computed.

    The checks and errors are those of the function `lack_of_references`.
    """
    with build_task(spec) as task:
        return built_tasks.lack_of_references(task, CHECKED)


def _scales(options: Sequence[str], metric: str) -> tuple[float, ...]:
    """Factors that correct the log-likelihoods of a multiple choice's options for the lengths of the options.

    There is a factor for each of `options`. For a metric that divides by lengths (acc_norm, acc_bytes), the factor is
    the mean length of the options divided by the option's length. For any other metric the factor is 1.
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
