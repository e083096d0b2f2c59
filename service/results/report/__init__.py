"""report.html: one self-contained page about a study, made from stored data alone.

The page works offline and without scripts, in light and dark mode, on phones and in print. Every chart has a table with
its values. The series of the charts come from `service.results.series`; the template is report.html.j2.

- `page`: puts the page together
- `texts`: the headline, key figures, and how numbers are written
- `holdout`: the section on held-out data
- `sample_pictures`: the section with pictures of held-out samples that only one of two merges has right
- `benchmarks`: the section on benchmarks
- `history`: the section on the values of trials at each rung that they finished
- `front`: the section on the Pareto front
- `hypervolume`: the picture of the front's hypervolume over the samples spent
- `descents`: the section on descents by gradients
- `policies`: the section on policies that a search has trained
- `races`: the section on stopped trials: at which rung, by which rule
- `directions`: the section on directions and scales of merges of the whole model
- `recipe_picture`: the picture of the best recipe
- `path_picture`: the picture of the best recipe's layer path
- `coefficients`: the picture of the best trial's coefficients
- `charts`: plots, heatmaps, forest plots, bars and legends as HTML and SVG
- `scales`: scales of charts and their ticks
- `marks`: shapes and colours of marks, and how many are drawn
"""

from __future__ import annotations

from service.results.report.page import render_report

__all__ = ["render_report"]
