"""The last stage of a study: it scores chosen trials on the study's benchmarks."""

from __future__ import annotations

from service.results.selection import chosen_trials
from service.store import JobWriter, Store
from service.tune.attacks import Attacks
from service.tune.judge_client import JudgeFailed
from service.tune.judging import Judging
from service.tune.plan import Plan
from service.tune.samples.sample_cache import SampleCache
from service.tune.trials import Trials
from service.types import EventKind
from workers.errors import InvalidModel, InvalidTask
from workers.types import Split

__all__ = ["BenchmarkStage"]


class BenchmarkStage:
    """The last stage of a study: it scores chosen trials on the study's benchmarks, after the held-out stage.

    A trial is first scored with a benchmark's original prompts. If the benchmark has an attack (a search for the prompt
    template with the worst metric), the attack follows (module `attacks`). If the benchmark has a judge (an LLM that
    rates completions), the judge reads the completions once all are stored, while other trials are scored (module
    `judging`). Samples that are stored are not scored again, for example if benchmarks are added to a study that has
    ended. In a study without benchmarks, the stage is finished at once. `plan` has the benchmarks, `trials` has the
    trials of the study, and `samples` caches the scored samples. `store` and `writer` read and write the database.
    """

    def __init__(self, plan: Plan, *, trials: Trials, samples: SampleCache, store: Store, writer: JobWriter) -> None:
        self.is_started = False
        self._plan = plan
        self._trials = trials
        self._samples = samples
        self._writer = writer
        self._attacks = Attacks(plan, store=store, writer=writer, samples=samples)
        self._judging = Judging(plan, store=store, writer=writer)
        self._judged: list[tuple[int, int]] = []
        self._left: list[tuple[int, int]] = []

    @property
    def is_finished(self) -> bool:
        return not self._plan.benchmarks or (self.is_started and not self._left and not self._judged)

    @property
    def awaited_judges(self) -> tuple[str, ...]:
        """The URLs of the LLM judges that have not answered all requests yet."""
        return self._judging.urls

    @property
    def left(self) -> tuple[tuple[int, int], ...]:
        """The evaluations that still need an engine, in the order of starting.

        An evaluation is given as (trial number, position of the benchmark in `Plan.benchmarks`).
        """
        return tuple(self._left)

    def start(self) -> None:
        """Choose the trials that are scored on each benchmark, by the rules in the study file.

        The method is called when the search and the held-out stage have finished. A second call changes nothing.
        """
        if self.is_started or not self._plan.benchmarks:
            return
        self.is_started = True
        trials = tuple(self._trials.values())
        self._left = sorted(
            (trial.number, index)
            for index, benchmark in enumerate(self._plan.benchmarks)
            for trial in chosen_trials(benchmark.trials, trials, self._plan.objectives)
            if self._samples.missing(trial.recipe.digest, index, Split.BENCHMARK)
            or not self._attacks.is_ended(trial.recipe.digest, index)
            or not self._judging.is_ended(trial.recipe.digest, index)
        )
        if self._left:
            left = [{"trial": number, "benchmark": self._plan.benchmarks[index].name} for number, index in self._left]
            self._writer.add_event(EventKind.BENCHMARKS_STARTED, {"left": left})

    def finish(self, number: int, index: int) -> None:
        """Finish a trial's evaluation on a benchmark, or continue it with a prompt attack or judgments.

        All samples of trial `number` on the benchmark at position `index` in `Plan.benchmarks` must be stored. If the
        benchmark has an attack (a search for the prompt template with the worst metric), the attack continues, and the
        evaluation stays in `left` until the attack has ended. If the benchmark has a judge (an LLM that rates
        completions), the judgments are requested; from then on the evaluation needs no engine.
        """
        digest = self._trials[number].recipe.digest
        try:
            if self._attacks.advance(digest, index):
                return
            if self._judging.begin(digest, index):
                self._left.remove((number, index))
                self._judged.append((number, index))
                return
        except (InvalidModel, InvalidTask, JudgeFailed) as error:
            self.fail(number, index, str(error))
            return
        self._left.remove((number, index))
        self._writer.add_event(EventKind.BENCHMARK_SCORED, self._payload(number, index))

    def take_judgments(self, *, timeout_s: float = 0.0) -> None:
        """Store new judgments of LLM judges, and finish the evaluations whose completions are all judged.

        If judgments are pending and none has arrived, the method waits up to `timeout_s` seconds for a judgment.
        """
        for digest, index, problem in self._judging.take(timeout_s=timeout_s):
            for number, _ in [each for each in self._judged if each[1] == index]:
                if self._trials[number].recipe.digest != digest:
                    continue
                self._judged.remove((number, index))
                if problem is None:
                    self._writer.add_event(EventKind.BENCHMARK_SCORED, self._payload(number, index))
                else:
                    payload = {**self._payload(number, index), "reason": problem}
                    self._writer.add_event(EventKind.BENCHMARK_FAILED, payload)

    def close(self) -> None:
        """Cancel the outstanding requests to LLM judges."""
        self._judging.close()

    def fail(self, number: int, index: int, reason: str) -> None:
        """Record that trial `number` cannot be scored on a benchmark, with the `reason` for it.

        `index` is the position of the benchmark in `Plan.benchmarks`. The trial keeps its other results, and is still
        scored on the other benchmarks.
        """
        self._left.remove((number, index))
        self._attacks.drop(self._trials[number].recipe.digest, index)
        self._writer.add_event(EventKind.BENCHMARK_FAILED, {**self._payload(number, index), "reason": reason})

    def _payload(self, number: int, index: int) -> dict[str, object]:
        return {"trial": number, "benchmark": self._plan.benchmarks[index].name}
