"""Texts for numbers and results, which the terminal and the report share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.schemas.files import (
        BenchmarkTestDocument,
        HoldoutDocument,
        PreferredDocument,
        SearchDocument,
        StartDocument,
        WarmStartDocument,
    )

__all__ = [
    "ATTACK_NAMES",
    "comparison_text",
    "duration",
    "preferred_text",
    "sample_count",
    "search_sentences",
    "sort_holdout",
    "violation_text",
]


# The attacks of a benchmark by their kind in the study file.
ATTACK_NAMES = {"stress": "StressTest", "deepwordbug": "DeepWordBug", "bert": "BERT-Attack"}


def comparison_text(test: BenchmarkTestDocument) -> str:
    """State in one sentence which merges beat the best baseline on a benchmark, or on an average of benchmarks.

    `test` is the comparison; its baseline is the best source model or the best published recipe.
    """
    what = f"the average of {test['name']}" if test["is_average"] else test["name"]
    kind = "single model" if test["against"] == "source" else "published recipe"
    rival = f"the best {kind}, {test['label']}"
    better = [difference for difference in test["differences"] if difference["is_better"]]
    shown = better or [max(test["differences"], key=lambda difference: difference["value"])]
    numbers = ", ".join(
        f"trial {d['trial']} {d['value']:+.3f} [{d['ci95'][0]:+.3f}, {d['ci95'][1]:+.3f}]" for d in shown
    )
    return f"{what}: {'' if better else 'no merge is '}better than {rival}: {numbers}"


def duration(seconds: float) -> str:
    """Format a number of seconds as people read it: 42s, 4m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def preferred_text(document: PreferredDocument) -> str:
    """Format one line about the trial that is best under a user's weights of the objectives.

    `document` has the weights and the trial. The line has the weights, the trial's number and label, and its value on
    each objective. The line also says whether the values are from held-out data or search data.
    """
    number = document["trial"]
    name = document["label"] if document["label"] == f"trial {number}" else f"trial {number}, {document['label']}"
    values = ", ".join(f"{key} {value:.3f}" for key, value in document["values"].items())
    weights = ",".join(f"{key}={weight:g}" for key, weight in document["weights"].items())
    data = "held-out data" if document["split"] == "holdout" else "search data"
    return f"preferred by {weights}: {name}, {values} on {data}"


def sample_count(samples: Mapping[str, int]) -> str:
    """Format the numbers of samples per objective: one number if all are equal, else a range such as "8-16"."""
    fewest, most = min(samples.values(), default=0), max(samples.values(), default=0)
    return str(most) if fewest == most else f"{fewest}-{most}"


def search_sentences(search: SearchDocument) -> list[str]:
    """Sentences about a study's search: its searcher, how it started, and how many samples it took.

    The first sentence names the searcher and the reason why it was chosen. If the search started from another study's
    results or policies, a sentence says so. The next sentences state the decisions that the searcher has stored. The
    last sentence has the number of samples.
    """
    chosen = search["algorithm"] or "a searcher that is not stored"
    cost = f"{search['trial_samples']:,} samples scored for its trials"
    if search["steps"]:
        cost += f"; {search['steps']:,} losses and gradients, charged as {search['step_samples']:,} samples"
    began = [] if search["start"] is None else [_start_sentence(search["start"])]
    if search["warm_start"] is not None:
        began.append(_warm_start_sentence(search["warm_start"]))
    return [f"{chosen}: {search['reason']}" if search["reason"] else chosen, *began, *search["notes"], cost]


def _start_sentence(start: StartDocument) -> str:
    policies = start["policies"]
    digests = ", ".join(policy["digest"][:12] for policy in policies)
    noun = "policy" if len(policies) == 1 else "policies"
    return f"it began with the {noun} {digests} of study {start['name']!r} ({start['study']})"


def _warm_start_sentence(start: WarmStartDocument) -> str:
    counted = f"{start['observations']:,} results of {start['trials']:,} trials"
    return f"it began with {counted} of study {start['name']!r} ({start['study']}), which are not counted here"


def sort_holdout(rows: Iterable[HoldoutDocument]) -> list[HoldoutDocument]:
    """Sort rows of held-out results by their mean over objectives, highest first.

    A row without a mean is sorted as if its mean were 0.
    """
    return sorted(rows, key=lambda row: -row["mean"]["value"] if row["mean"] else 0.0)


def violation_text(violations: Mapping[str, float]) -> str:
    """Text of the violated constraints with their excesses; empty if no constraint is violated.

    `violations` contains the excess of each violated constraint, in the metric's unit, keyed by the constraint's text.
    """
    found = (f"{constraint} by {excess:.3g}" for constraint, excess in violations.items())
    return f"violates {', '.join(found)}" if violations else ""
