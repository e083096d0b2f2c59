"""Report section with pictures of held-out samples on which the chosen merge and a rival differ."""

from __future__ import annotations

import base64
from typing import Any

from service.results.pictures import MAX_BYTES, Contrast, PicturedSample, Prediction
from service.results.record import RunRecord
from service.results.report.texts import trial_name

__all__ = ["pictures_section"]


def pictures_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section with pictures of samples; None for studies without pictures.

    Pictures are in the HTML itself, as data URIs.
    """
    if not run.contrasts:
        return None
    names = {trial.number: trial_name(trial) for trial in run.trials}
    return {
        "max_kib": MAX_BYTES // 1024,
        "left_out": sum(
            sample.is_left_out for each in run.contrasts for sample in (*each.only_chosen, *each.only_rival)
        ),
        "contrasts": [_contrast(each, names) for each in run.contrasts],
    }


def _contrast(contrast: Contrast, names: dict[int, str]) -> dict[str, Any]:
    chosen, rival = names[contrast.trial], names[contrast.rival]
    directions = [
        (True, contrast.num_chosen, contrast.only_chosen),
        (False, contrast.num_rival, contrast.only_rival),
    ]
    return {
        "objective": contrast.objective,
        "chosen": chosen,
        "rival": rival,
        "kind": contrast.kind,
        "directions": [
            {
                "right": chosen if is_chosen_right else rival,
                "wrong": rival if is_chosen_right else chosen,
                "count": count,
                "samples": [_sample(each, chosen, rival, is_chosen_right=is_chosen_right) for each in samples],
            }
            for is_chosen_right, count, samples in directions
        ],
    }


def _sample(sample: PicturedSample, chosen: str, rival: str, *, is_chosen_right: bool) -> dict[str, Any]:
    picture = sample.picture
    return {
        "document": sample.document,
        "label": "class not stored" if sample.label is None else sample.label,
        "source": None if picture is None else f"data:image/webp;base64,{base64.b64encode(picture).decode()}",
        "reason": "left out" if sample.is_left_out else "no picture is stored",
        "answers": [
            {"model": chosen, "text": _text(sample.chosen), "is_right": is_chosen_right},
            {"model": rival, "text": _text(sample.rival), "is_right": not is_chosen_right},
        ],
    }


def _text(prediction: Prediction | None) -> str:
    return "answer not stored" if prediction is None else f"{prediction.name} {prediction.probability:.1%}"
