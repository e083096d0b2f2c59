"""Mean numbers of tokens of a task's samples, computed without an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path

from workers.cache import cached
from workers.evaluation.prompts import Generation, Prompts
from workers.evaluation.sample_facts import Lengths
from workers.evaluation.task_reader import reader_of
from workers.models.tokenizers import tokenizer_digest
from workers.types import TaskSpec, digest_of

__all__ = ["Lengths", "lengths_of", "text_lengths"]

LOOKED_AT = 50  # the first documents of each subtask


def lengths_of(spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
    """Measure the mean numbers of tokens that a model reads and generates for one sample of the task `spec`.

    The numbers are means over the first documents of each of the task's lm-eval tasks. `prompts` has the tokenizer and
    the options on which prompts depend. Results are cached for tasks that a JSONL file defines, if `spec` has the hash
    of the file, because importing the tokenizer takes seconds. `cache` is the directory of the cache, or None for the
    default directory. Raises InvalidTask if the task cannot be built or one of these documents cannot be tokenized.
    """
    return reader_of(spec.task).lengths(spec, prompts, cache=cache)


def text_lengths(spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
    """Measure the mean numbers of tokens that a model reads and generates for a sample of the text task `spec`.

    The arguments and errors are those of the function `lengths_of`.
    """
    if spec.content is None or not isinstance(spec.task, Mapping):
        return _counted(spec, prompts)
    options = digest_of(prompts.options.document())
    key = f"lengths {LOOKED_AT} {spec.digest} {options} {tokenizer_digest(prompts.directory)} {version('lm_eval')}"
    if (record := cached(key, cache=cache)) is not None:
        return Lengths(*json.loads(record))
    found = _counted(spec, prompts)
    cached(key, json.dumps(astuple(found)), cache=cache)
    return found


def _counted(spec: TaskSpec, prompts: Prompts) -> Lengths:
    from workers.evaluation.lm_eval import BackendLM, tokenized_requests
    from workers.evaluation.tasks import build_task

    lm = BackendLM(None, prompts)
    read = answered = limit = 0.0
    with build_task(spec) as built:
        for subtask, documents in zip(built.subtasks, lm.documents(built, limit=LOOKED_AT), strict=True):
            share = subtask.num_samples / len(built.order) / len(documents)
            for document in documents:
                texts = document.right().texts if subtask.output_type == "generate_until" else ()
                # of the longest right answer, with the token that ends a completion
                right = max((len(prompts.encode(text, special_tokens=False)) + 1 for text in texts), default=0)
                for request in tokenized_requests(lm, document):
                    tokenized = request.tokenized
                    # an engine generates at least one
                    most = tokenized.max_tokens if isinstance(tokenized, Generation) else 1
                    read += share * len(tokenized.tokens)
                    answered += share * min(most, right or most)
                    limit += share * most
    return Lengths(read, answered, limit)
