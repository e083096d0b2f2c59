"""Curves of losses and evaluations, and how the report draws them."""

from __future__ import annotations

from pathlib import Path

from service.results.training.curves import directory_curves
from service.results.training.page import render_training
from tests.service.api.harness import finetuning
from workers.training.finetuning.fleet import parse_pipeline
from workers.training.finetuning.history import METRICS, History


def histories(directory: Path) -> dict[str, Path]:
    """Histories of an expert that mergopt trains and of one that sam trains."""
    update = {"steps": 12, "gradient_norm": 1.0, "learning_rate": 1e-5, "tokens": 8, "seconds": 0.1}
    places = {alias: directory / alias for alias in ("math", "text")}
    for alias, place in places.items():
        place.mkdir()
        history = History(place / METRICS, is_writer=True, report=lambda _: None)
        for step in range(1, 13):
            line = {"step": step, "loss": 3.0 + step, **update}
            if alias == "math":
                line |= {"alpha": 0.5, "models": 3}
                if step in (1, 11, 12):
                    line["weights_loss"] = 1.0 + step
            else:
                line["offset_loss"] = 20.0 + step
            history.add(line)
    return places


def test_losses_are_kept_apart_by_where_they_are_measured(tmp_path: Path) -> None:
    """The loss of mergopt is at the offset, with some at the weights; that of sam the other way round, with all."""
    math, text = directory_curves(histories(tmp_path))["experts"]
    assert (math["loss_at"], text["loss_at"]) == ("offset", "weights")
    assert [point["loss"] for point in math["loss"]] == [3.0 + step for step in range(1, 13)]
    assert math["weights_loss"] == [{"step": step, "loss": 1.0 + step} for step in (1, 11, 12)]
    assert text["offset_loss"] == [{"step": step, "loss": 20.0 + step} for step in range(1, 13)]
    assert math["offset_loss"] == text["weights_loss"] == []


def test_the_report_names_where_losses_are_measured(tmp_path: Path) -> None:
    pipeline = parse_pipeline(finetuning())
    page = render_training(pipeline, directory_curves(histories(tmp_path)), state="RUNNING")
    assert "15.000, at the offset; 13.000, at the weights" in page
    for name in ("math, at the offset", "math, at the weights", "text", "text, at the offset"):
        assert f"{name}</" in page
    assert page.count("stroke-dasharray:5 3") == 2 + 11 + 2, "in the legend, and between the points of both"


def test_a_linearized_model_is_beside_its_exported_weights(tmp_path: Path) -> None:
    places = histories(tmp_path)
    evaluation = {"step": 12, "values": {"sums": 0.25}}
    History(places["math"] / METRICS, is_writer=True, report=lambda _: None).add(evaluation)
    linearized = {**evaluation, "linearized_values": {"sums": 0.75}}
    History(places["text"] / METRICS, is_writer=True, report=lambda _: None).add(linearized)
    curves = directory_curves(places)
    assert [expert["evaluations"] for expert in curves["experts"]] == [[evaluation], [linearized]]
    page = render_training(parse_pipeline(finetuning()), curves, state="RUNNING")
    assert "text, linearized, update 12: 0.750" in page
    assert "text, linearized</" in page
    assert "0.250 (0.750 linearized)" in page
    assert "math, linearized" not in page
