"""Results of fine-tunings: losses and evaluations during training, and an analysis of the trained experts.

- `curves`: losses and evaluations, from a server's events or a run's directory
- `analysis`: the distribution of task vectors, and the losses of merges
- `pictures`: the analysis as pictures and rows of tables
- `page`: the report, one page
"""

from __future__ import annotations

from service.results.training.analysis import (
    ANALYSIS_FILE,
    analyse,
    joined,
    lack_of_losses,
    read_analysis,
    stored_analysis,
)
from service.results.training.curves import directory_curves, stored_curves
from service.results.training.page import render_training

__all__ = [
    "ANALYSIS_FILE",
    "analyse",
    "directory_curves",
    "joined",
    "lack_of_losses",
    "read_analysis",
    "render_training",
    "stored_analysis",
    "stored_curves",
]
