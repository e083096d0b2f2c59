"""Judgments of completions by LLM judges; background threads of the driver request them.

Only the driver's own thread reads and writes the store. A driver that is started again requests the judgments that are
missing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from search_spaces.study.judge import JudgeSpec
from service.results.judgments import judged_recipes
from service.store import JobWriter, JudgmentRecord, Store
from service.tune.judge_client import JudgeClient, JudgeFailed
from service.tune.plan import Plan
from workers.evaluation.judging import JudgedItem, judge_prompt, judged_items, preference_of, prompt_digest
from workers.types import Split

__all__ = ["Judging"]

Key = tuple[str, int]  # digest of a recipe, position of the benchmark in the plan


@dataclass
class _Pending:
    """The requests to an LLM judge about one recipe's completions on one benchmark.

    `num_left` is the number of requests that are unanswered. `is_cancelled` is set once the requests are cancelled.
    """

    num_left: int
    is_cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class _Question:
    """One request to an LLM judge, with the `prompt` to send.

    `key` has the recipe's digest and the position of the benchmark, `benchmark` has the benchmark's name. `position` is
    the index, in scoring order, of the sample whose completion is judged. `is_swapped` says whether the completion is
    the second answer in the prompt, after the reference answer.
    """

    key: Key
    benchmark: str
    position: int
    is_swapped: bool
    prompt: str


class Judging:
    """The judgments of a study's completions by LLM judges: they are requested in the background, and stored.

    A judgment is the answer of a language model that compares a completion with a reference answer. A benchmark is
    identified by its position in `Plan.benchmarks`. `plan` has the benchmarks with their judges. Completions are read
    from `store`, and judgments are stored by `writer`.
    """

    def __init__(self, plan: Plan, *, store: Store, writer: JobWriter) -> None:
        self._plan = plan
        self._store = store
        self._writer = writer
        self._pending: dict[Key, _Pending] = {}
        self._answers: SimpleQueue[tuple[_Question, JudgmentRecord | JudgeFailed]] = SimpleQueue()
        self._judges: dict[int, _Judge] = {}
        self._items: dict[str, tuple[JudgedItem, ...]] = {}  # by the digest of the task
        self._ended = {
            (digest, index)
            for index, benchmark in enumerate(plan.benchmarks)
            if benchmark.judge is not None
            for digest in self._judged(index)
        }

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of the LLM judges that have not answered all requests yet."""
        judges = [self._plan.benchmarks[index].judge for _, index in self._pending]
        return tuple(dict.fromkeys(judge.url for judge in judges if judge is not None))

    def is_ended(self, digest: str, index: int) -> bool:
        """Whether a benchmark's judge, an LLM, has rated all completions of a recipe; True if there is no judge.

        `digest` identifies the recipe, and `index` is the position of the benchmark in `Plan.benchmarks`.
        """
        return self._plan.benchmarks[index].judge is None or (digest, index) in self._ended

    def begin(self, digest: str, index: int) -> bool:
        """Request the missing judgments of a recipe's stored completions on a benchmark from its judge, an LLM.

        `digest` identifies the recipe, and `index` is the position of the benchmark in `Plan.benchmarks`. Returns
        whether judgments are pending. When the last pending judgment has arrived, `take` returns the recipe and the
        benchmark.

        Raises:
            JudgeFailed: Completions are no longer stored, or too few of the judge's answers have a verdict.
            InvalidTask: The task cannot be built.
        """
        benchmark, key = self._plan.benchmarks[index], (digest, index)
        if benchmark.judge is None or key in self._pending:
            return key in self._pending
        if key in self._ended:
            self._check(key)
            return False
        questions = self._missing(digest, index, benchmark.judge)
        self._pending[key] = _Pending(len(questions))
        if index not in self._judges:
            self._judges[index] = _Judge(benchmark.judge, self._answers)
        self._judges[index].ask(questions, self._pending[key].is_cancelled)
        return True

    def take(self, *, timeout_s: float = 0.0) -> list[tuple[str, int, str | None]]:
        """Store new judgments of LLM judges, and return the recipes whose judgments are complete or have failed.

        Each result is (digest of the recipe, position of the benchmark, reason of the failure or None). If nothing has
        arrived, the method waits up to `timeout_s` seconds for a judgment.
        """
        arrived = self._arrived(timeout_s) if self._pending else []
        judgments = [result for _, result in arrived if isinstance(result, JudgmentRecord)]
        if judgments:
            self._writer.add_judgments(judgments)
        ended: list[tuple[str, int, str | None]] = []
        for question, result in arrived:
            pending = self._pending.get(question.key)
            if pending is None:  # it has failed before
                continue
            pending.num_left -= 1
            if isinstance(result, JudgeFailed):
                pending.is_cancelled.set()
                del self._pending[question.key]
                ended.append((*question.key, str(result)))
            elif pending.num_left == 0:
                del self._pending[question.key]
                self._ended.add(question.key)
                ended.append((*question.key, self._problem(question.key)))
        return ended

    def close(self) -> None:
        """Cancel the outstanding requests for judgments, so that no thread sends further requests."""
        for pending in self._pending.values():
            pending.is_cancelled.set()
        self._pending.clear()
        for judge in self._judges.values():
            judge.close()
        self._judges.clear()

    def _arrived(self, timeout_s: float) -> list[tuple[_Question, JudgmentRecord | JudgeFailed]]:
        arrived: list[tuple[_Question, JudgmentRecord | JudgeFailed]] = []
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                left_s = 0.0 if arrived else max(0.0, deadline - time.monotonic())
                arrived.append(self._answers.get(block=left_s > 0, timeout=left_s or None))
        except Empty:
            return arrived

    def _judged(self, index: int) -> Iterable[str]:
        facts = self._plan.benchmarks[index].facts
        stored = self._store.judgments(self._plan.study_id, benchmark=facts.name)
        return judged_recipes(stored, num_samples=facts.num_samples)

    def _problem(self, key: Key) -> str | None:
        digest, facts = key[0], self._plan.benchmarks[key[1]].facts
        stored = self._store.judgments(self._plan.study_id, benchmark=facts.name, recipe_digest=digest)
        return judged_recipes(stored, num_samples=facts.num_samples)[digest].problem

    def _check(self, key: Key) -> None:
        if problem := self._problem(key):
            raise JudgeFailed(problem)

    def _missing(self, digest: str, index: int, judge: JudgeSpec) -> list[_Question]:
        study, benchmark = self._plan.study_id, self._plan.benchmarks[index]
        known = {
            (judgment.position, judgment.is_swapped)
            for judgment in self._store.judgments(study, benchmark=benchmark.name, recipe_digest=digest)
        }
        samples = self._store.samples(study, digest, Split.BENCHMARK)
        scored = {sample.position: sample for sample in samples if sample.objective == benchmark.name}
        if any(sample.value > 0 and not sample.response for sample in scored.values()):  # the value is the length
            raise JudgeFailed("its completions were removed from the study; add a benchmark of another name")
        task = benchmark.task
        if task.digest not in self._items:
            self._items[task.digest] = judged_items(task)
        return [
            _Question((digest, index), benchmark.name, position, is_swapped, prompt)
            for position, item in enumerate(self._items[task.digest])
            for is_swapped in (False, True)
            if (position, is_swapped) not in known
            for prompt in (judge_prompt(judge.prompt, item, scored[position].response, is_swapped=is_swapped),)
        ]


class _Judge:
    """A pool of threads that send requests to one LLM judge; `judge.concurrency` is the largest number of threads.

    The threads put each judgment, or the reason why there is no judgment, into `answers`. A thread ends when no request
    is left.
    """

    def __init__(self, judge: JudgeSpec, answers: SimpleQueue[tuple[_Question, JudgmentRecord | JudgeFailed]]) -> None:
        self._client = JudgeClient(judge)
        self._answers = answers
        self._lock = threading.Lock()
        self._left: deque[tuple[_Question, threading.Event]] = deque()
        self._num_threads = 0

    def ask(self, questions: Sequence[_Question], is_cancelled: threading.Event) -> None:
        with self._lock:
            self._left.extend((question, is_cancelled) for question in questions)
            wanted = min(self._client.judge.concurrency, len(self._left))
            for _ in range(wanted - self._num_threads):
                self._num_threads += 1
                threading.Thread(target=self._work, name="judge", daemon=True).start()

    def close(self) -> None:
        self._client.close()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._num_threads -= 1
                    return
                question, is_cancelled = self._left.popleft()
            self._answer(question, is_cancelled)

    def _answer(self, question: _Question, is_cancelled: threading.Event) -> None:
        try:
            answer = self._client.ask(question.prompt, is_cancelled=is_cancelled)
        except JudgeFailed as failed:
            self._answers.put((question, failed))
            return
        except Exception as error:  # its thread would end in silence, and the study would wait for ever
            self._answers.put((question, JudgeFailed(f"{type(error).__name__}: {error}")))
            return
        if answer is not None:
            judgment = JudgmentRecord(
                benchmark=question.benchmark,
                recipe_digest=question.key[0],
                position=question.position,
                is_swapped=question.is_swapped,
                preference=preference_of(answer.text, is_swapped=question.is_swapped),
                model=answer.model,
                prompt_digest=prompt_digest(question.prompt),
                answer=answer.text,
            )
            self._answers.put((question, judgment))
