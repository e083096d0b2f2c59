"""Scoring: a backend answers a task's samples, and lm-eval's filters and metrics turn the answers into values.

Requests are built and tokenized once per task. After that, scoring is one batch for the backend and the metric of each
sample (module `metrics`). The backend is the warm engine or plain transformers (interface
`workers.evaluation.prompts.Backend`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM  # noqa: TID253  (a base class; this module loads where models are)

from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import Answers, BuiltTask, Document, PromptSettings, documents_of
from workers.evaluation.lm_eval_tasks import MAX_TOKENS
from workers.evaluation.metrics import Documents, LocalMetrics, Metrics
from workers.evaluation.prompts import Backend, Completion, Continuation, Generation, Prompts
from workers.evaluation.sample_texts import text_of
from workers.evaluation.tasks import build_task
from workers.types import SampleResult, SampleTexts, Span, TaskInfo, TaskSpec

__all__ = ["BackendLM", "Scored", "TaskEvaluator", "describe", "tokenized_requests"]

DEFAULT_MAX_TOKENS = 256  # lm-eval's default
MAX_KEPT_TOKENS = 50_000_000  # of prompts; about 2 GB, at 36 bytes for a token in a tuple
KNOWN_ARGUMENTS = frozenset(
    {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample", "temperature", "top_p", "top_k", "num_beams"}
)

# The end of messages about texts that are too long.
RAISE_LIMIT = "raise engine.max_model_len, or data.max_length of a fine-tuning, if the model reads more"


@dataclass(frozen=True)
class Scored:
    """Scored samples, and a hash of the prompts that were used for each objective of the study.

    `samples` are in the order of the requested spans (ranges of samples). `prompts` maps an objective's name to the
    sha256 (hex) of the tokens of all prompts that were scored for it.
    """

    samples: tuple[SampleResult, ...]
    prompts: Mapping[str, str]


@dataclass(frozen=True)
class _Request:
    """A tokenized request to a backend, and the lm-eval request `instance` from which it was made.

    `is_truncated` says whether the beginning of the prompt was cut to fit the model's maximum length. `instance` must
    not be modified.
    """

    instance: Any
    tokenized: Generation | Continuation
    is_truncated: bool


@dataclass(frozen=True)
class _Prepared:
    """A built task with its documents (lm-eval's samples) and the tokenized requests of each document.

    `documents[i][j]` is document j of the task's i-th lm-eval task, and `requests[i][j]` has its requests; both indices
    begin with 0.
    """

    task: BuiltTask
    documents: tuple[tuple[Document, ...], ...]
    requests: tuple[tuple[tuple[_Request, ...], ...], ...]

    def at(self, position: int) -> tuple[_Request, ...]:
        subtask, document = self.task.order[position]
        return self.requests[subtask][document]

    @property
    def num_truncated(self) -> int:
        return sum(any(r.is_truncated for r in requests) for subtask in self.requests for requests in subtask)

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(r.tokenized.tokens) for subtask in self.requests for requests in subtask for r in requests)

    @property
    def contents(self) -> Documents:
        return tuple(
            {document.instances[0].doc_id: document.instances[0].doc for document in documents}
            for documents in self.documents
        )


class _Asked:
    """A sample with its requests to the backend and the answers received so far.

    `position` is the sample's place in the scoring order of `task`. `answers[i]` is the answer to the i-th request, or
    None until it arrives. The answer to a request to generate is an object of the class `Completion`. The answer to a
    request to score is the pair (log-likelihood, whether greedy decoding gives the text).
    """

    def __init__(self, task: BuiltTask, position: int, requests: tuple[_Request, ...]) -> None:
        self.task = task
        self.position = position
        self.requests = requests
        self.answers: list[Any] = [None] * len(requests)

    @property
    def in_order(self) -> Answers:
        """The backend's answers to this sample, in one group for each of lm-eval's requests.

        A group has several answers if lm-eval repeats the request.
        """
        by_instance: dict[int, list[Any]] = {}
        for request, answer in zip(self.requests, self.answers, strict=True):
            by_instance.setdefault(id(request.instance), []).append(
                answer.text if isinstance(answer, Completion) else answer
            )
        subtask, _ = self.task.order[self.position]
        return Answers(subtask, self.requests[0].instance.doc_id, tuple(map(tuple, by_instance.values())))


class BackendLM(TemplateLM):  # type: ignore[misc]
    """Adapter that gives a backend (engine or transformers) the interface of an lm-eval model.

    With it, lm-eval's own evaluator can also use the backend. `backend` is None if requests are only tokenized.
    `prompts` has the tokenizer, and the options by which texts become prompts.
    """

    def __init__(self, backend: Backend | None, prompts: Prompts) -> None:
        super().__init__()
        self.backend_ = backend
        self.prompts = prompts
        self.tokenizer = prompts.tokenizer
        options = prompts.options
        self.template = self.chat_template(options.chat_template) if options.chat_template else None
        if options.chat_template and not self.template:
            raise InvalidTask(
                f"engine.chat_template is on, but the tokenizer of {prompts.directory} has no chat template"
            )

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that is put before an option if a task has no prompt.

        The token is BOS, or the end-of-text token if the tokenizer has no BOS.
        """
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.prompts.max_length

    @property
    def _limit(self) -> str:
        return f"the {self.max_length} tokens that are read"

    @property
    def tokenizer_name(self) -> str:
        return self.prompts.directory.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.prompts.encode(string, special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the chat messages `chat_history` as text with the tokenizer's chat template.

        With `add_generation_prompt`, the text ends where the model's answer begins. Otherwise the last message is left
        open, so that the model continues it. Raises InvalidTask if the chat template refuses the messages, for example
        a system prompt.
        """
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                chat_template=self.template,
            )
        except jinja2.TemplateError as error:
            raise InvalidTask(
                f"the chat template of {self.prompts.directory} refuses these messages: {error}"
            ) from error
        return str(text)

    def documents(self, task: BuiltTask, *, limit: int | None = None) -> tuple[tuple[Document, ...], ...]:
        """Documents (samples) of each lm-eval task of a task, with prompts rendered for this model.

        With `limit`, only the first `limit` documents of each lm-eval task are rendered.
        """
        options = self.prompts.options
        render = self.apply_chat_template if options.chat_template else None
        return documents_of(task, PromptSettings(options.system_prompt, render, self.tokenizer_name, limit))

    def tokenize(self, instance: Any) -> tuple[Generation | Continuation, bool]:
        """Tokenize the lm-eval request `instance` for the backend, cutting the beginning of a prompt that is too long.

        Returns the tokenized request, and whether its prompt was cut to fit the model's maximum length. Raises
        InvalidTask for requests that backends cannot answer.
        """
        if instance.request_type == "generate_until":
            context, arguments = instance.args
            return self._generation(context, arguments, seed=int(instance.doc_id or 0))
        if instance.request_type == "loglikelihood":
            context, continuation = instance.args
            return self._continuation(*self._pair(context, continuation))
        raise InvalidTask(
            f"request type {instance.request_type!r} cannot be answered; use a generating or scoring task"
        )

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        assert self.backend_ is not None
        generations = [self.tokenize(request)[0] for request in requests]
        completions = self.backend_.generate([request for request in generations if isinstance(request, Generation)])
        return [completion.text for completion in completions]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        raise InvalidTask("rolling log-likelihood (perplexity of whole texts) is not a mean over samples")

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        assert self.backend_ is not None
        return self.backend_.loglikelihoods([self._continuation(context, tail)[0] for _, context, tail in requests])

    def _generation(self, context: str, arguments: Mapping[str, Any], *, seed: int) -> tuple[Generation, bool]:
        max_tokens = DEFAULT_MAX_TOKENS
        for name in MAX_TOKENS:
            max_tokens = int(arguments.get(name) or max_tokens)
        if unknown := sorted(set(arguments) - KNOWN_ARGUMENTS):
            raise InvalidTask(
                f"generation argument {unknown[0]!r} is not supported; known are {', '.join(sorted(KNOWN_ARGUMENTS))}"
            )
        if int(arguments.get("num_beams") or 1) > 1:
            raise InvalidTask("generation argument num_beams: beam search is not supported; use 1")
        room = self.max_length - max_tokens
        if room < 1:
            raise InvalidTask(
                f"{max_tokens} new tokens leave no room for a prompt in {self._limit}; lower the task's max_tokens, or "
                f"{RAISE_LIMIT}"
            )
        until = arguments.get("until") or ()
        temperature = _temperature(arguments)
        tokens = self.prompts.encode(context)
        generation = Generation(
            tokens=tuple(tokens[-room:]),
            max_tokens=max_tokens,
            stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
            temperature=temperature,
            top_p=float(arguments.get("top_p") or 1.0) if temperature > 0 else 1.0,
            top_k=int(arguments.get("top_k") or 0) if temperature > 0 else 0,
            seed=seed if temperature > 0 else 0,
        )
        return generation, len(tokens) > room

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            encoded: tuple[list[int], list[int]] = self._encode_pair(context, continuation)
            return encoded
        tail = self.prompts.encode(continuation, special_tokens=False)
        return ([self.prefix_token_id], tail) if tail[:1] != [self.prefix_token_id] else (tail[:1], tail[1:])

    def _continuation(self, context: Sequence[int], tail: Sequence[int]) -> tuple[Continuation, bool]:
        room = self.max_length - 1  # the engine always generates one token
        tokens = [*context, *tail]
        cut = max(0, len(tokens) - room)
        if not tail:
            raise InvalidTask(
                "an option has no tokens to score: its text is empty, or merges into the prompt's last token"
            )
        if cut >= len(context):
            raise InvalidTask(
                f"an option of {len(tail)} tokens leaves no room for a prompt in {self._limit}; {RAISE_LIMIT}"
            )
        return Continuation(tuple(tokens[cut:]), len(context) - cut), cut > 0


class TaskEvaluator:
    """Evaluator that scores samples of tasks on one backend (engine), and keeps tokenized tasks for later calls.

    `backend` may be None if nothing is scored. `prompts` has the tokenizer, and the options by which texts become
    prompts. `metrics` computes the metrics of samples. By default they are computed in this process; then the method
    `score` must be called in the main thread. The metric of a task with its own code is always computed by the
    sandboxed process of this task.

    The most recently used tokenized tasks are kept, up to MAX_KEPT_TOKENS prompt tokens together. The tasks of one call
    of the method `score` are always kept.
    """

    def __init__(self, backend: Backend | None, prompts: Prompts, *, metrics: Metrics | None = None) -> None:
        self.backend = backend
        self.lm = BackendLM(backend, prompts)
        self._metrics = metrics or LocalMetrics()
        self._prepared: dict[str, _Prepared] = {}  # by the task's digest, least recently used first

    def with_backend(self, backend: Backend) -> TaskEvaluator:
        """Create an evaluator that uses `backend`, and that shares this evaluator's tasks and tokenized requests."""
        other = TaskEvaluator(backend, self.lm.prompts, metrics=self._metrics)
        other._prepared = self._prepared
        return other

    def describe(self, spec: TaskSpec) -> TaskInfo:
        """Build the task `spec`, and return facts about it, such as the number of prompts that are cut.

        A prompt is cut if it is longer than the option `max_model_len` allows. Raises InvalidTask if the task cannot be
        built.
        """
        prepared = self._prepare(spec)
        self._forget_all_but({spec.digest})
        return replace(prepared.task.info, num_truncated=prepared.num_truncated)

    def sample_texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        """Prompt and right answer of the samples [start, stop) of the task `spec`, in the order of scoring.

        The prompt includes the system prompt, and is rendered by the chat template, if the options have them. Raises
        InvalidTask if the task cannot be built.
        """
        prepared = self._prepare(spec)
        self._forget_all_but({spec.digest})
        return tuple(text_of(prepared.documents[subtask][index]) for subtask, index in prepared.task.order[start:stop])

    def is_greedy(self, spec: TaskSpec) -> bool:
        first = self._prepare(spec).at(0)[0].tokenized
        return not (isinstance(first, Generation) and first.temperature > 0)

    def requests(self, spec: TaskSpec, position: int) -> tuple[Generation | Continuation, ...]:
        """The tokenized requests of one sample of the task `spec`, in lm-eval's order.

        A request is a prompt to complete, or an option of a multiple choice to score. `position` is the sample's index,
        from 0, in the order in which the task's samples are scored.
        """
        return tuple(request.tokenized for request in self._prepare(spec).at(position))

    def task(self, spec: TaskSpec) -> BuiltTask:
        """The built task of `spec`, kept from an earlier call or built now.

        Raises InvalidTask if it cannot be built.
        """
        return self._prepare(spec).task

    def confined_by(self, spans: Iterable[Span]) -> str:
        """Names of the mechanisms that restrict the code of the tasks in `spans`; "" if no task has its own code.

        A span is a range of adjacent samples of one task.
        """
        found = (self._prepare(span.task).task.info.confined_by for span in spans)
        return "; ".join(sorted({each for each in found if each}))

    def document(self, spec: TaskSpec, position: int) -> Document:
        """The document (lm-eval's term for a sample) at one position of the task `spec`, with lm-eval's requests.

        `position` is the sample's index, from 0, in the order in which the task's samples are scored. The requests are
        in the same order as the result of the method `requests`, and must not be modified.
        """
        prepared = self._prepare(spec)
        subtask, document = prepared.task.order[position]
        return prepared.documents[subtask][document]

    def score(self, spans: Sequence[Span]) -> Scored:
        """Score all samples of `spans`; a span is a range of adjacent samples of one task.

        The backend gets all prompts to complete in one batch, and all options to score in another batch. Raises
        InvalidTask if a span exceeds its task's data, MetricFailed if a metric fails, and the errors of the backend.
        """
        prepared = [self._requests_of(span) for span in spans]
        self._forget_all_but({span.task.digest for span in spans})
        tasks = [self._prepare(span.task).task for span in spans]
        every = [
            _Asked(task, position, requests)
            for task, samples in zip(tasks, prepared, strict=True)
            for position, requests in samples
        ]
        try:
            self._ask(every)
            asked = iter(every)
            samples = [self._judge(span, list(islice(asked, span.stop - span.start))) for span in spans]
        finally:
            for code in filter(None, (task.code for task in tasks)):
                code.forget()
        return Scored(
            samples=tuple(sample for each in samples for sample in each),
            prompts={
                span.objective: _hash(request.tokenized.tokens for _, requests in samples for request in requests)
                for span, samples in zip(spans, prepared, strict=True)
            },
        )

    def _requests_of(self, span: Span) -> list[tuple[int, tuple[_Request, ...]]]:
        prepared = self._prepare(span.task)
        if not 0 <= span.start <= span.stop <= len(prepared.task.order):
            raise InvalidTask(
                f"objective {span.objective}: samples {span.start}-{span.stop} requested of a task with "
                f"{len(prepared.task.order)} samples"
            )
        return [(position, prepared.at(position)) for position in range(span.start, span.stop)]

    def _ask(self, samples: Sequence[_Asked]) -> None:
        """Send the requests of samples to the backend, and store its answers in the samples.

        If a task has its own code, the computation of a sample's metric begins as soon as the sample's last completion
        arrives, while the backend generates completions of other samples.
        """
        assert self.backend is not None
        requests = [(each, index) for each in samples for index in range(len(each.requests))]
        tokenized = [each.requests[index].tokenized for each, index in requests]
        generations = [i for i, request in enumerate(tokenized) if isinstance(request, Generation)]
        continuations = [i for i, request in enumerate(tokenized) if isinstance(request, Continuation)]

        def answer(i: int, given: Any) -> None:
            sample, index = requests[i]
            sample.answers[index] = given
            if sample.task.code is not None and all(found is not None for found in sample.answers):
                sample.task.code.begin(sample.in_order)

        if generations:
            self.backend.generate(
                [request for request in tokenized if isinstance(request, Generation)],
                finished=lambda index, completion: answer(generations[index], completion),
            )
        if continuations:
            scores = self.backend.loglikelihoods([each for each in tokenized if isinstance(each, Continuation)])
            for i, score in zip(continuations, scores, strict=True):
                answer(i, score)

    def _judge(self, span: Span, samples: Sequence[_Asked]) -> list[SampleResult]:
        task = self._prepare(span.task).task
        answers = [sample.in_order for sample in samples]
        values = self._metrics.values(span.task.digest, answers) if task.code is None else task.code.values(answers)
        return [
            SampleResult(
                objective=span.objective,
                position=sample.position,
                document=task.document(sample.position),
                value=value,
                response=_response(sample.answers),
                is_truncated=any(request.is_truncated for request in sample.requests),
                tokens=_tokens(sample.answers),
            )
            for sample, value in zip(samples, values, strict=True)
        ]

    def _prepare(self, spec: TaskSpec) -> _Prepared:
        prepared = self._prepared.pop(spec.digest, None)
        if prepared is None:
            task = build_task(spec)
            documents = self.lm.documents(task)
            requests = tuple(tuple(tokenized_requests(self.lm, each) for each in subtask) for subtask in documents)
            prepared = _Prepared(task, documents, requests)
            if task.code is None:
                self._metrics.open(task, prepared.contents)
        self._prepared[spec.digest] = prepared
        return prepared

    def _forget_all_but(self, in_use: Collection[str]) -> None:
        """Drop tokenized tasks, least recently used first, until at most MAX_KEPT_TOKENS prompt tokens are kept.

        Tasks whose digest is in `in_use` are never dropped. Of the others, tasks with an attacked template (a changed
        prompt template) are dropped first, and all of them, because each is scored only once.
        """
        kept = sum(prepared.num_tokens for prepared in self._prepared.values())
        unused = [digest for digest in self._prepared if digest not in in_use]
        attacked = {digest for digest in unused if self._prepared[digest].task.spec.template is not None}
        for digest in sorted(unused, key=lambda digest: digest not in attacked):
            if kept <= MAX_KEPT_TOKENS and digest not in attacked:
                return
            forgotten = self._prepared.pop(digest)
            kept -= forgotten.num_tokens
            forgotten.task.close()
            self._metrics.close(digest)


def tokenized_requests(lm: BackendLM, document: Document) -> tuple[_Request, ...]:
    """The requests of a task's document, tokenized by `lm`, in lm-eval's order.

    Raises InvalidTask if the document cannot be tokenized.
    """

    def tokenized(instance: Any) -> list[_Request]:
        request, is_truncated = lm.tokenize(instance)
        if not isinstance(request, Generation):
            return [_Request(instance, request, is_truncated)]
        # Each of several draws of one prompt has its own seed.
        repeats = [replace(request, seed=request.seed * instance.repeats + i) for i in range(instance.repeats)]
        draws = repeats if request.temperature > 0 else [request] * instance.repeats
        return [_Request(instance, draw, is_truncated) for draw in draws]

    return tuple(request for instance in document.instances for request in tokenized(instance))


def describe(specs: Sequence[TaskSpec], *, directory: str, options: EngineOptions) -> tuple[TaskInfo, ...]:
    """Facts about tasks, such as their sizes and how many prompts are too long for the model in `directory`.

    `specs` are the tasks. The function needs the model's tokenizer, but no engine. `options` are the engine's options,
    which also affect prompts. Raises InvalidTask if a task cannot be built.
    """
    evaluator = TaskEvaluator(None, Prompts(directory, options))
    return tuple(map(evaluator.describe, specs))


def _temperature(arguments: Mapping[str, Any]) -> float:
    """The sampling temperature that a task's generation arguments ask for.

    The result is 0 (greedy) if the arguments rule out sampling (`do_sample: false`), else the stated temperature. If no
    temperature is stated, the result is 1 with `do_sample: true`, and 0 otherwise.
    """
    if arguments.get("do_sample") is False:
        return 0.0
    given = arguments.get("temperature")
    return float(given) if given is not None else float(bool(arguments.get("do_sample")))


def _response(answers: Sequence[Any]) -> str:
    if isinstance(answers[0], Completion):
        texts = [completion.text for completion in answers]
        return texts[0] if len(texts) == 1 else json.dumps(texts)
    return json.dumps([score for score, _ in answers])


def _tokens(answers: Sequence[Any]) -> tuple[tuple[int, ...], ...] | None:
    return tuple(answer.tokens for answer in answers) if isinstance(answers[0], Completion) else None


def _hash(prompts: Iterable[Sequence[int]]) -> str:
    """The sha256 (hex) of the token ids of several prompts; each prompt's length is hashed before its tokens."""
    total = hashlib.sha256()
    for tokens in prompts:
        total.update(np.asarray([len(tokens), *tokens], dtype="<i8").tobytes())
    return total.hexdigest()
