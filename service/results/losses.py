"""Losses in the history of a training: where they are measured, and their keys in stored events.

`loss` is measured where the gradient is computed. `weights_loss` is measured at the weights, and `offset_loss` at an
offset from them; not every update has these two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PLURALS", "is_at_offset"]

# In events: the key of several updates' losses, by the key of one update's loss in a history.
PLURALS: Mapping[str, str] = {"loss": "losses", "weights_loss": "weights_losses", "offset_loss": "offset_losses"}


def is_at_offset(line: Mapping[str, Any]) -> bool:
    """Whether the loss in a line of a training's history is measured at the offset that the method mergopt draws.

    The `loss` of all other methods is measured at the weights.
    """
    return "alpha" in line
