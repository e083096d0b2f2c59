"""Registry of the kinds of job, such as study and fine-tuning.

A new kind needs a package like `search` and `finetune`, and a name in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.jobs.base import JobKind
from service.jobs.finetune.kind import FINETUNE
from service.jobs.search.kind import SEARCH
from service.jobs.serving.kind import SERVING

__all__ = ["KINDS", "kind_of"]

# By name, in the order in which documents, commands and clients look through them.
KINDS: Mapping[str, JobKind] = {kind.name: kind for kind in (SEARCH, FINETUNE, SERVING)}


def kind_of(name: str) -> JobKind:
    """Declaration of the kind of job with the given name. Raises LookupError if there is no such kind."""
    if name not in KINDS:
        raise LookupError(f"job kind {name!r}: this version knows {', '.join(KINDS)}")
    return KINDS[name]
