"""Losses and values of a training as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.training.finetuning.history import LINEARIZED, VALUES

__all__ = ["loss_text", "value_texts"]


def value_texts(line: Mapping[str, Any]) -> list[str]:
    """Texts of the values of an evaluation, such as "math 0.610", by objective.

    `line` has `values` and, for the method tangent, `linearized_values`, which are added in parentheses.
    """
    linearized = line.get(LINEARIZED, {})
    return [
        f"{name} {value:.3f}" + (f" ({linearized[name]:.3f} linearized)" if name in linearized else "")
        for name, value in line.get(VALUES, {}).items()
    ]


def loss_text(line: Mapping[str, Any], *, is_moved: bool) -> str:
    """Text of a training's loss, such as "loss 1.2500 at the offset, 1.1000 at the weights".

    `line` has the number `loss` and, if they were measured, `weights_loss` and `offset_loss`. `is_moved` says that
    `loss` is measured at the offset that the method mergopt draws, and not at the weights.
    """
    text = f"loss {line['loss']:.4f}{' at the offset' if is_moved else ''}"
    if "weights_loss" in line:
        text += f", {line['weights_loss']:.4f} at the weights"
    if "offset_loss" in line:
        text += f", {line['offset_loss']:.4f} at the offset"
    return text
