"""SVG helpers: scales, positions, escaping."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.results.report.charts import Bar, Cell, Interval, Legend, Plot, forest, heatmap, legend, stacked_bar
from service.results.report.scales import Levels, Scale, nice_scale


@pytest.mark.parametrize(
    ("values", "low", "high", "ticks"),
    [
        ([0.27, 0.71], 0.2, 0.8, ["0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]),
        ([0, 69], 0, 80, ["0", "20", "40", "60", "80"]),
        ([12_400, 18_000], 12_000, 18_000, ["12,000", "14,000", "16,000", "18,000"]),
        ([], 0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_scale_has_round_ends_and_ticks(values: list[float], low: float, high: float, ticks: list[str]) -> None:
    scale = nice_scale(values)
    assert (scale.low, scale.high) == pytest.approx((low, high))
    assert [scale.text(tick) for tick in scale.ticks] == ticks


def test_scale_stays_within_its_bounds() -> None:
    assert nice_scale([0.93, 1.0], bounds=(0, 1)).high == 1.0
    assert nice_scale([1.0], bounds=(0, 1)).high == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
@example([0.0, 5e-324])
def test_scale_holds_every_value_and_few_ticks(values: list[float]) -> None:
    scale = nice_scale(values)
    slack = 1e-6 * scale.step
    assert scale.low <= min(values) + slack
    assert scale.high >= max(values) - slack
    assert 1 <= len(scale.ticks) <= 12


def test_points_and_steps_are_where_their_values_are() -> None:
    plot = Plot(Scale(0, 10, 5), Scale(0, 1, 0.5), label="", height=150)
    plot.point(2.5, 1.0, css="a")
    plot.steps([(0, 1), (10, 0)], css="b")
    svg = plot.render()
    assert '<circle cx="25.00%" cy="10.0" r="4" class="a">' in svg
    # Along x at the first height, then down at the second place: through (10, 1), not through (0, 0).
    assert re.findall(r'<line ([^>]*) class="b"/>', svg) == [
        'x1="0.00%" y1="10.0" x2="100.00%" y2="10.0"',
        'x1="100.00%" y1="10.0" x2="100.00%" y2="110.0"',
    ]


def test_forest_draws_each_interval_where_it_is() -> None:
    svg = forest([Interval("base", 0.5, 0.25, 0.75, css="source")], Scale(0, 1, 0.5), label="x", reference=1.0)
    assert '<line x1="25.00%" x2="75.00%"' in svg
    assert 'cx="50.00%"' in svg
    assert 'class="reference"' in svg


def test_texts_are_escaped_everywhere() -> None:
    bad = '<b title="x">&'
    plot = Plot(Scale(0, 1, 1), Scale(0, 1, 1), label=bad, x_title=bad, y_title=bad)
    plot.point(0, 0, css="a", title=bad)
    plot.text(0, 0, bad)
    drawn = [
        plot.render(),
        forest([Interval(bad, 0, 0, 1, css="a", title=bad)], Scale(0, 1, 1), label=bad),
        legend([Legend(bad, "a")]),
        stacked_bar([Bar(bad, 1.0, "")]),
    ]
    for svg in drawn:
        assert "<b" not in svg
        assert "&lt;b" in svg


def test_levels_are_labelled_by_their_names() -> None:
    scale = Levels(0, 3.3, 1, names=("30", "90", "270"))
    assert [scale.text(tick) for tick in scale.ticks] == ["", "30", "90", "270"]


def test_a_curve_joins_its_points_and_a_bar_is_level() -> None:
    plot = Plot(Scale(0, 10, 1), Scale(0, 1, 1), label="a curve and a bar")
    plot.curve([(0, 0), (5, 1), (10, 0)], css="loss", style="stroke:red")
    plot.bar(2, 4, 0.5, css="stop", title="<b>")
    html = plot.render()
    assert html.count('class="loss" style="stroke:red"') == 2
    number = '"([0-9.%]+)"'
    ((x1, x2, y1, y2),) = re.findall(f'x1={number} x2={number} y1={number} y2={number} class="stop"', html)
    assert (x1, x2) == ("20.00%", "40.00%")
    assert y1 == y2
    assert "<title>&lt;b&gt;</title>" in html


def test_a_heatmap_has_its_cells_in_place_and_cuts_long_names() -> None:
    rows = [
        ("embedding", [Cell(0, 1.0, "all", span=2)]),
        ("layer 0", [Cell(0, 0.5, "a"), Cell(1, -2.0, "<b>")]),
    ]
    html = heatmap(rows, ["attention", "post_attention_layernorm"], label="coefficients")
    cells = re.findall(r'<rect x="(.+?)" width="(.+?)" .+?class="(.+?)" style="--v:(.+?)"><title>(.+?)</title>', html)
    assert cells == [
        ("0.00%", "100.00%", "cell plus", "100%", "all"),
        ("0.00%", "50.00%", "cell plus", "50%", "a"),
        ("50.00%", "50.00%", "cell minus", "100%", "&lt;b&gt;"),
    ]
    assert "post_attenti…<title>post_attention_layernorm</title>" in html
    assert ">layer 0</text>" in html


def test_movable_texts_do_not_overlap() -> None:
    """Texts around one point go to its four sides, strong ones first, and the fifth is left out."""
    plot = Plot(Scale(0, 1, 0.5), Scale(0, 1, 0.5), label="", height=200)
    for name in ("one", "two", "three", "four"):
        plot.text(0.5, 0.5, name, dy=-11, is_movable=True)
    plot.text(0.5, 0.5, "best", css="note strong", dy=-11, is_movable=True)
    found = re.findall(r'dx="(.+?)" dy="(.+?)" .+? class="note.*?">(\w+)<', plot.render())
    assert found == [("9", "-7", "best"), ("-9", "-7", "one"), ("9", "15", "two"), ("-9", "15", "three")]


def test_long_names_keep_both_ends() -> None:
    """A name that is too long for its place has an ellipsis in it, and is whole in its tooltip."""
    name = "expert:math-instruct-v2.1"
    html = forest([Interval(name, 0.5, 0.2, 0.8, css="a")], Scale(0, 1, 0.5), label="")
    assert f">expert:math-i…t-v2.1<title>{name}</title></text>" in html
    plot = Plot(Scale(0, 1, 0.5), Scale(0, 1, 0.5), label="", x_title=f"{'x' * 60} →")
    assert re.search("x…x{9} →<title>x{60} →</title>", plot.render())
