"""Results of fine-tunings: the losses and evaluations in the course of training.

- `curves`: the points, from a server's events or a run's directory
- `page`: their pictures, one page
"""

from __future__ import annotations

from service.results.training.curves import directory_curves, stored_curves
from service.results.training.page import render_training

__all__ = ["directory_curves", "render_training", "stored_curves"]
