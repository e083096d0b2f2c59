"""The image tasks that a study file can name: ten tasks of the HM3 and MergOPT papers, for CLIP's zero-shot heads.

HM3 reports the first eight tasks (SUN397 to DTD); MergOPT reports all ten, with Flowers102 and PCAM. The data sets are
the copies on the hub that publications on merging use. A zero-shot head is computed from texts: templates such as "a
photo of a {}." with the names of the classes. The templates are those of the zero-shot evaluations of Radford et al.
2021, as published with CLIP. The names are the labels of the data set or, if these are not words, those of the same
evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ENTROPY", "HUB", "IMAGE_SUITES", "ImageSuite", "with_described_suites"]

HUB = "hub:"  # the beginning of `images` that names a data set of the hub instead of files
# The metric of image tasks that needs no labels.
ENTROPY = "entropy"

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class ImageSuite:
    """Description of an image task that a study file can name.

    - `data`, `config`: the name of the data set on the hub, and its configuration if it has several
    - `sizes`: the number of images of the split "test", keyed by "test"; further splits, such as "train", are not
      listed
    - `templates`: texts that describe a class, with {} in place of its name
    - `classes`: the names of the classes in the order of the labels; None if the names in the data set are used
    - `paper`, `licence`: the tables that report the task, and the licence of the data
    """

    data: str
    sizes: Mapping[str, int]
    templates: tuple[str, ...]
    classes: tuple[str, ...] | None = None
    config: str | None = None
    licence: str = "none stated (card)"
    paper: str = "HM3, vision tables of the authors' replies; MergOPT, Tables 5 and 9"

    def description(self, split: str | None) -> dict[str, Any]:
        """The task in the form of a study file, with the split `split`; None means the split `test`."""
        optional = {"config": self.config, "classes": None if self.classes is None else list(self.classes)}
        return {
            "images": HUB + self.data,
            "split": split or "test",
            "head": "base",
            "templates": list(self.templates),
            **{key: value for key, value in optional.items() if value is not None},
        }


def _with_articles(*texts: str) -> tuple[str, ...]:
    """Three variants of each text: its placeholder {} alone, with "a" before it, and with "the" before it."""
    return tuple(text.replace("{}", form) for form in ("{}", "a {}", "the {}") for text in texts)


_VIEWS = tuple(f"{kind} {of} of {{}}." for of in ("imagery", "photo", "view") for kind in ("satellite", "aerial"))
_TEXTURES = tuple(f"a photo of {article} {{}} {kind}." for article in ("a", "the") for kind in
                  ("texture", "pattern", "thing", "object"))  # fmt: skip
_CARS = (
    "a photo of a {}.", "a photo of the {}.", "a photo of my {}.", "i love my {}!",
    *(f"a photo of my {state} {{}}." for state in ("dirty", "clean", "new", "old")),
)  # fmt: skip
_SIGNS = tuple(f'a {view} photo of a "{{}}" traffic sign.' for view in ("zoomed in", "centered", "close up"))
_NUMBER = ('a photo of the number: "{}".',)

_LIMITS = tuple(f"red and white circle {speed} kph speed limit" for speed in (20, 30, 50, 60, 70, 80))
_TRIANGLE, _RING = "red and white triangle", "red and white circle"
_BLUE, _STRIKE = "blue circle with white", "white circle with gray strike bar"
TRAFFIC_SIGNS = (
    *_LIMITS, "end / de-restriction of 80 kph speed limit", f"{_RING} 100 kph speed limit",
    f"{_RING} 120 kph speed limit", f"{_RING} red car and black car no passing",
    f"{_RING} red truck and black car no passing", f"{_TRIANGLE} road intersection warning",
    "white and yellow diamond priority road", "red and white upside down triangle yield right-of-way", "stop",
    "empty red and white circle", f"{_RING} no truck entry", "red circle with white horizonal stripe no entry",
    f"{_TRIANGLE} with exclamation mark warning", f"{_TRIANGLE} with black left curve approaching warning",
    f"{_TRIANGLE} with black right curve approaching warning",
    f"{_TRIANGLE} with black double curve approaching warning", f"{_TRIANGLE} rough / bumpy road warning",
    f"{_TRIANGLE} car skidding / slipping warning", f"{_TRIANGLE} with merging / narrow lanes warning",
    f"{_TRIANGLE} with person digging / construction / road work warning",
    f"{_TRIANGLE} with traffic light approaching warning", f"{_TRIANGLE} with person walking warning",
    f"{_TRIANGLE} with child and person walking warning", f"{_TRIANGLE} with bicyle warning",
    f"{_TRIANGLE} with snowflake / ice warning", f"{_TRIANGLE} with deer warning", f"{_STRIKE} no speed limit",
    f"{_BLUE} right turn arrow mandatory", f"{_BLUE} left turn arrow mandatory", f"{_BLUE} forward arrow mandatory",
    f"{_BLUE} forward or right turn arrow mandatory", f"{_BLUE} forward or left turn arrow mandatory",
    f"{_BLUE} keep right arrow mandatory", f"{_BLUE} keep left arrow mandatory",
    f"{_BLUE} arrows indicating a traffic circle", f"{_STRIKE} indicating no passing for cars has ended",
    f"{_STRIKE} indicating no passing for trucks has ended",
)  # fmt: skip
LAND = (
    "annual crop land", "forest", "brushland or shrubland", "highway or road",
    "industrial buildings or commercial buildings", "pasture land", "permanent crop land",
    "residential buildings or homes or apartments", "river", "lake or sea",
)  # fmt: skip
ONLY_MERGOPT = "MergOPT, Tables 5 and 9"

IMAGE_SUITES: Mapping[str, ImageSuite] = {
    "clip_sun397": ImageSuite(
        "tanganke/sun397", {"test": 19850}, ("a photo of a {}.", "a photo of the {}.")
    ),
    "clip_cars": ImageSuite("tanganke/stanford_cars", {"test": 8041}, _CARS),
    "clip_resisc45": ImageSuite("tanganke/resisc45", {"test": 6300}, _with_articles(*_VIEWS)),
    "clip_eurosat": ImageSuite(
        "tanganke/eurosat", {"test": 2700}, _with_articles("a centered satellite photo of {}."), LAND
    ),
    "clip_svhn": ImageSuite(
        "ufldl-stanford/svhn", {"test": 26032}, _NUMBER, DIGITS, config="cropped_digits"
    ),
    "clip_gtsrb": ImageSuite("tanganke/gtsrb", {"test": 12630}, _SIGNS, TRAFFIC_SIGNS),
    "clip_mnist": ImageSuite("ylecun/mnist", {"test": 10000}, _NUMBER, DIGITS, licence="MIT (card)"),
    "clip_dtd": ImageSuite("tanganke/dtd", {"test": 1880}, _TEXTURES),
    "clip_flowers102": ImageSuite(
        "dpdl-benchmark/oxford_flowers102", {"test": 6149},
        ("a photo of a {}, a type of flower.",), paper=ONLY_MERGOPT,
    ),
    "clip_pcam": ImageSuite(
        "1aurent/PatchCamelyon", {"test": 32768}, ("this is a photo of {}",),
        ("lymph node", "lymph node containing metastatic tumor tissue"), licence="CC0-1.0 (card)", paper=ONLY_MERGOPT,
    ),
}  # fmt: skip


def with_described_suites(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a study's `document` in which the name of each image task is replaced by the task's description."""
    found = dict(document)
    for section in ("objectives", "holdout", "benchmarks"):
        entries = document.get(section)
        if isinstance(entries, list):
            found[section] = [_described(entry) for entry in entries]
    return found


def _described(entry: Any) -> Any:
    name = entry.get("task") if isinstance(entry, Mapping) else None
    suite = IMAGE_SUITES.get(name) if isinstance(name, str) else None
    if suite is None or not isinstance(entry.get("split"), str | None):
        return entry
    rest = {key: value for key, value in entry.items() if key != "split"}
    return {**rest, "task": suite.description(entry.get("split"))}
