"""Overlap of the items of two tasks: equal items, and items with 13 consecutive words in common.

An item is the question of a sample, with its options and right answers, without few-shot examples. The rule follows the
analysis of GPT-3 (Brown et al. 2020, "Language models are few-shot learners", appendix C): n-grams of 13 words, in
lower case, without punctuation. An n-gram that occurs in more than 10 items is not counted, because it is regarded as
text of the prompt template.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.cache import cached
from workers.evaluation.built_tasks import Document, PromptSettings, documents_of
from workers.evaluation.lm_eval_tasks import inline_rows
from workers.evaluation.sample_facts import Item
from workers.evaluation.task_reader import reader_of
from workers.evaluation.tasks import build_task
from workers.types import TaskSpec, digest_of

__all__ = ["Item", "OverlappingItems", "SearchItems", "items_of", "overlapping", "text_items"]

NUM_WORDS = 13

# An n-gram in more items of a task than this is part of the task, such as an instruction, not of its items.
MAX_ITEMS = 10

# Names of overlapping items that a result has.
NUM_EXAMPLES = 10

# A new version of the rule: cached results of an older one are not used.
VERSION = 2

# Words, and single characters of scripts that do not separate words by spaces (kana, CJK ideographs).
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class OverlappingItems:
    """Counts of the items (samples as text) of one task that overlap with the items of other tasks.

    - `num_items`: the number of the task's items
    - `num_exact`: the number of items that are equal to an item of another task
    - `num_overlapping`: the number of items that are equal to an item of another task, or share 13 consecutive words
      with an item of another task
    - `by_other`: for each other task, the number of items that overlap with its items
    - `examples`: names of the first overlapping items
    """

    num_items: int
    num_exact: int
    num_overlapping: int
    by_other: Mapping[str, int]
    examples: tuple[str, ...]


class SearchItems:
    """Index of the items of several tasks; it finds the items of another task that have text in common with them.

    `items` has the items (samples as text) of each task, keyed by the task's name.
    """

    def __init__(self, items: Mapping[str, Iterable[Item]]) -> None:
        self._texts: dict[str, frozenset[bytes]] = {}
        self._ngrams: dict[str, NDArray[np.uint64]] = {}
        for name, of_task in items.items():
            texts: list[bytes] = []
            ngrams = [np.empty(0, np.uint64)]
            for item in of_task:
                texts.append(_whole(item.text))
                ngrams.append(_ngrams(item.text))
            most = min(MAX_ITEMS, max(1, len(texts) // 2))  # in a small task, of half of its items
            self._texts[name] = frozenset(texts)
            different, counts = np.unique(np.concatenate(ngrams), return_counts=True)
            self._ngrams[name] = different[counts <= most]

    def overlapping(self, items: Iterable[Item]) -> OverlappingItems:
        """Count the items (samples as text) of another task that overlap with the items in this index.

        Two items overlap if their texts are equal or have 13 consecutive words in common.
        """
        by_other: Counter[str] = Counter()
        num_items = num_exact = 0
        names: list[str] = []
        for item in items:
            num_items += 1
            text, ngrams = _whole(item.text), _ngrams(item.text)
            equal = {name for name, texts in self._texts.items() if text in texts}
            others = equal | {name for name, known in self._ngrams.items() if _has_common(known, ngrams)}
            num_exact += bool(equal)
            by_other.update(others)
            names += [item.name] if others else []
        return OverlappingItems(num_items, num_exact, len(names), dict(by_other), tuple(names[:NUM_EXAMPLES]))


def overlapping(search: Mapping[str, TaskSpec], tasks: Mapping[str, TaskSpec]) -> dict[str, OverlappingItems]:
    """Count, for each of `tasks`, the items that share text with items of any task in `search`.

    An item is a sample's text. `search` has the tasks on which a study searches, and `tasks` has other tasks, such as
    held-out tasks and benchmarks. Both arguments map names to tasks; the keys of the result are the names in `tasks`.
    Results are cached by the content of the tasks. Raises InvalidTask if a task cannot be built.
    """
    keys = {name: _key(search, task) for name, task in tasks.items()}
    stored = {name: cached(key) for name, key in keys.items()}
    found = {name: _read(text) for name, text in stored.items() if text is not None}
    if len(found) < len(tasks):
        index = SearchItems({name: items_of(task) for name, task in search.items()})
        for name in tasks.keys() - found.keys():
            found[name] = index.overlapping(items_of(tasks[name]))
            cached(keys[name], json.dumps(vars(found[name])))
    return {name: found[name] for name in tasks}


def items_of(spec: TaskSpec) -> Iterator[Item]:
    """Yield the items of the task `spec` (its samples as text), in the order of its data.

    Raises InvalidTask if the task cannot be built.
    """
    return reader_of(spec.task).items(spec)


def text_items(spec: TaskSpec) -> Iterator[Item]:
    """Yield the items (samples as text) of the text task `spec`, in the order of its data.

    Raises InvalidTask if the task cannot be built.
    """
    if isinstance(spec.task, Mapping):
        for index, row in enumerate(inline_rows(spec)):
            yield Item(str(index), f"{row.prompt}\n{row.answer}")
        return
    with build_task(replace(spec, num_fewshot=0)) as task:
        documents = documents_of(task, PromptSettings(None, None, ""))
        for subtask, of_subtask in zip(task.subtasks, documents, strict=True):
            for document in of_subtask:
                doc_id = document.instances[0].doc_id
                name = f"{subtask.name}/{doc_id}" if len(task.subtasks) > 1 else str(doc_id)
                yield Item(name, _text(document))


def _text(document: Document) -> str:
    """Join the texts of a document: prompt, options, and the right answers of a generating task.

    A text that occurs twice is included once.
    """
    parts: list[str] = []
    for instance in document.instances:
        parts += [part for part in instance.args if isinstance(part, str)]
    return "\n".join(dict.fromkeys((*parts, *document.right().texts)))


def _key(search: Mapping[str, TaskSpec], task: TaskSpec) -> str:
    """Cache key for the number of items (samples as text) of `task` that overlap with items of the tasks in `search`.

    The key depends on the settings that determine the items of a task, and leaves out other settings. For a task of the
    hub or of lm-eval it depends on the name only: its data are assumed not to change.
    """

    def of(spec: TaskSpec) -> Any:
        return replace(spec, num_fewshot=0, permutation_seed=0, metric="", filter=None, max_tokens=None).to_json()

    return f"overlap {VERSION} {digest_of([of(task), {name: of(spec) for name, spec in search.items()}])}"


def _read(text: str) -> OverlappingItems:
    fields = json.loads(text)
    return OverlappingItems(**{**fields, "examples": tuple(fields["examples"])})


def _whole(text: str) -> bytes:
    """Digest of a text without regard to case and white space."""
    return blake2b(" ".join(text.lower().split()).encode(), digest_size=16).digest()


def _ngrams(text: str) -> NDArray[np.uint64]:
    """Eight-byte digests of the distinct word n-grams of a text (13 consecutive words), in ascending order.

    The words of an n-gram are in the same line. Otherwise the last words of a template would form n-grams together with
    short answers that follow them.
    """
    found: set[str] = set()
    for line in text.lower().splitlines():
        words: Sequence[str] = WORD.findall(line)
        found |= {" ".join(words[start : start + NUM_WORDS]) for start in range(len(words) - NUM_WORDS + 1)}
    digests = b"".join(blake2b(ngram.encode(), digest_size=8).digest() for ngram in found)
    return np.unique(np.frombuffer(digests, np.uint64))


def _has_common(known: NDArray[np.uint64], others: NDArray[np.uint64]) -> bool:
    """Whether the sorted arrays `known` and `others` share an element."""
    places = np.searchsorted(known, others)
    is_within = places < len(known)
    return bool(np.any(known[places[is_within]] == others[is_within]))
