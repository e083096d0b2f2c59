"""report.html: one self-contained page about a run, made from stored records alone.

Works offline and without scripts, in light and dark mode, on phones and in print; every chart comes with its table.

The series of its charts come from `service.results.series`; its template is report.html.j2.

- `page`: puts the page together
- `texts`: the headline, key figures, and how numbers are written
- `holdout`: the section on held-out data
- `history`: the section on every finished rung
- `front`: the section on the Pareto front
- `hypervolume`: the picture of its volume over the samples spent
- `descents`: the sections on descents by gradients, and on policies that are learned
- `races`: the section on who was stopped when
- `recipe_picture`: the picture of the best recipe
- `path_picture`: the picture of its layer path
- `coefficients`: the picture of its coefficients
- `charts`: plots, forest plots, bars and legends as HTML and SVG
- `marks`: shapes of marks, and how many are drawn
"""

from __future__ import annotations

from service.results.report.page import render_report

__all__ = ["render_report"]
