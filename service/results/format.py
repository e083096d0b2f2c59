"""Numbers and rows as both the terminal and the report show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.schemas.files import HoldoutDocument, SearchDocument

__all__ = ["duration", "sample_count", "search_sentences", "sort_holdout"]


def duration(seconds: float) -> str:
    """Seconds for people: 42s, 4m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def sample_count(samples: Mapping[str, int]) -> str:
    """Samples per objective: one number, or the fewest and the most."""
    fewest, most = min(samples.values(), default=0), max(samples.values(), default=0)
    return str(most) if fewest == most else f"{fewest}-{most}"


def search_sentences(search: SearchDocument) -> list[str]:
    """The searcher and why it was chosen, what it noted on the way, and what its trials and its own steps cost."""
    chosen = search["algorithm"] or "a searcher that is not stored"
    cost = f"{search['trial_samples']:,} samples scored for its trials"
    if search["steps"]:
        cost += f"; {search['steps']:,} losses and gradients, charged as {search['step_samples']:,} samples"
    return [f"{chosen}: {search['reason']}" if search["reason"] else chosen, *search["notes"], cost]


def sort_holdout(rows: Iterable[HoldoutDocument]) -> list[HoldoutDocument]:
    """Highest mean first; without a mean, in the order given."""
    return sorted(rows, key=lambda row: -row["mean"]["value"] if row["mean"] else 0.0)
