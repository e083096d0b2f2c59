"""When trials are promoted from rung to rung, and which results a proposal may know.

- `base`: the table of rungs and brackets that every scheduler keeps
- `successive_halving`: Hyperband, ASHA, and one rung without promotion
- `racing`: comparisons with the best trials on the same samples
"""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.fidelity import Scheduler
from service.tune.schedulers.base import RungTable
from service.tune.schedulers.racing import RacingTable
from service.tune.schedulers.successive_halving import AshaTable, HyperbandTable

__all__ = ["SCHEDULERS"]

SCHEDULERS: Mapping[Scheduler, type[RungTable]] = {
    "hyperband": HyperbandTable,
    "asha": AshaTable,
    "racing": RacingTable,
    "none": HyperbandTable,  # with one rung: there is nothing to promote
}
