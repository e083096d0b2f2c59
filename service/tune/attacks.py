"""Prompt attacks on benchmarks: searches for the prompt template with which a merge scores worst.

Each attack is for one recipe on one benchmark (`workers.evaluation.attacks.search`). Samples that are scored with a
changed template are stored under a separate name. A driver that is started again repeats the search with the stored
values, so nothing is scored again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache

from search_spaces.study.attacks import BertAttack
from service.store import JobWriter, Store
from service.store.documents import ATTACKS, AttackResult, read_attacks
from service.tune.plan import Plan
from service.tune.samples.sample_cache import SampleCache
from workers.evaluation.attacks.masked_model import MaskedModel
from workers.evaluation.attacks.search import Attacked, PromptAttack, Replacements, Search, search
from workers.types import Split, TaskSpec

__all__ = ["Attacks", "samples_name"]


def samples_name(task: TaskSpec) -> str:
    """Name for storing the samples of a task with a changed prompt template.

    The name depends only on the task, so benchmarks with equal tasks share the samples. The name begins with "@", so it
    differs from the names of objectives and benchmarks.
    """
    return f"@{task.digest[:40]}"


@dataclass
class _Running:
    """A running prompt attack on one recipe: a search for the prompt template with the worst metric.

    `steps` is the search, a generator that yields templates and receives their mean scores. `names` has, for each
    template whose score the search waits for, the name under which the template's samples are stored.
    """

    steps: Search
    names: tuple[str, ...]


class Attacks:
    """The prompt attacks of a study, one for each pair of a recipe and a benchmark with an attack.

    An attack on a recipe is a search for the prompt template with which the recipe has its worst metric. The methods
    identify a benchmark by its position in `Plan.benchmarks`, and a recipe by its digest. `samples` caches the scores
    of templates. `store` and `writer` read and write the attacks' progress in the database.
    """

    def __init__(self, plan: Plan, *, store: Store, writer: JobWriter, samples: SampleCache) -> None:
        self._plan = plan
        self._writer = writer
        self._samples = samples
        self._running: dict[tuple[str, int], _Running] = {}
        stored = read_attacks(store.document(plan.study_id, ATTACKS))
        self._ended = {(found.recipe, found.benchmark): found for found in stored}
        tasks = {benchmark.name: benchmark.task for benchmark in plan.benchmarks}
        if any(benchmark.attack is not None for benchmark in plan.benchmarks):
            known = store.prompt_templates(plan.study_id)
            samples.add_attacked_tasks(
                {name: replace(tasks[of], template=text) for name, (of, text) in known.items() if of in tasks}
            )

    def is_ended(self, digest: str, index: int) -> bool:
        """Whether the attack (search for the worst prompt template) on a recipe has ended for a benchmark.

        `digest` identifies the recipe, and `index` is the position of the benchmark in `Plan.benchmarks`. The result is
        True for a benchmark without an attack.
        """
        benchmark = self._plan.benchmarks[index]
        return benchmark.attack is None or (digest, benchmark.name) in self._ended

    def advance(self, digest: str, index: int) -> bool:
        """Continue the attack on a recipe (search for the worst template) until it needs scores of more templates.

        `digest` identifies the recipe, and `index` is the position of the benchmark in `Plan.benchmarks`. Call this
        method when all samples that the attack has requested are stored. Afterwards the sample cache lists the samples
        of the further templates as missing, unless they are stored. Returns False if the attack has ended, or if the
        benchmark has no attack. Raises InvalidModel if the fill-mask model cannot be used.
        """
        benchmark = self._plan.benchmarks[index]
        if benchmark.attack is None or self.is_ended(digest, index):
            return False
        try:
            running = self._running.get((digest, index))
            if running is None:
                steps = self._search(digest, index, benchmark.attack)
                templates = next(steps)
            else:
                steps = running.steps
                templates = steps.send([self._samples.mean(digest, Split.BENCHMARK, name) for name in running.names])
        except StopIteration as end:
            self._end(digest, index, end.value)
            return False
        tasks = [replace(benchmark.task, template=text) for text in templates]
        names = tuple(map(samples_name, tasks))
        self._writer.add_prompt_templates(benchmark.name, dict(zip(names, templates, strict=True)))
        self._samples.add_attacked_tasks(dict(zip(names, tasks, strict=True)))
        self._samples.set_attacked(digest, index, names)
        self._running[digest, index] = _Running(steps, names)
        return True

    def drop(self, digest: str, index: int) -> None:
        """Give up the attack on a recipe (search for the worst template), for example because scoring failed.

        The stored samples of the attack are kept. `digest` identifies the recipe, and `index` is the position of the
        benchmark in `Plan.benchmarks`.
        """
        self._running.pop((digest, index), None)
        self._samples.set_attacked(digest, index, ())

    def _search(self, digest: str, index: int, attack: PromptAttack) -> Search:
        benchmark = self._plan.benchmarks[index]
        return search(
            attack,
            clean=self._samples.mean(digest, Split.BENCHMARK, benchmark.name),
            seed=self._plan.seed,
            lowest=benchmark.objective.bounds[0],
            replacements=_replacements(attack),
        )

    def _end(self, digest: str, index: int, found: Attacked) -> None:
        """Store the result of a finished prompt attack on a recipe.

        `digest` identifies the recipe, and `index` is the position of the benchmark in `Plan.benchmarks`. `found` has
        the worst template and the number of templates that were scored.
        """
        benchmark = self._plan.benchmarks[index]
        task = replace(benchmark.task, template=found.template)
        is_original = benchmark.attack is not None and found.template == benchmark.attack.original.text
        self.drop(digest, index)
        self._ended[digest, benchmark.name] = AttackResult(
            benchmark=benchmark.name,
            recipe=digest,
            template=found.template,
            samples=benchmark.name if is_original else samples_name(task),
            num_queries=found.num_queries,
            is_cut=found.is_cut,
        )
        self._writer.set_document_named(ATTACKS, [asdict(each) for each in self._ended.values()])


def _replacements(attack: PromptAttack) -> Replacements | None:
    return _masked_model(attack.option.model, attack.option.encoder) if isinstance(attack.option, BertAttack) else None


@cache
def _masked_model(model: str, encoder: str | None) -> MaskedModel:
    """Load the fill-mask model that proposes word replacements; later calls in this process return the same model.

    `model` and `encoder` are directories or hub ids. `encoder` is the model that measures the similarity of texts; None
    means `model`.
    """
    return MaskedModel(model, encoder=encoder)
