"""report.html: one self-contained page about a run, made from stored records alone.

Works offline and without scripts, in light and dark, on a phone and on paper; beside every chart is its table.

`page` puts it together: the words at its top come from `texts`, its sections from `holdout`, `history`, `front` and
`recipe_picture`, which are drawn with `charts`; what they become is in `templates/report.html.j2`.
"""

from __future__ import annotations

from service.results.report.page import render_report

__all__ = ["render_report"]
