"""Image tasks: folders and JSONL files, their order and facts, and messages about mistakes in them."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vision import CLASSES, image_folder, image_lines, tiny_vit
from workers.errors import InvalidTask
from workers.evaluation.image_tasks import (
    IMAGE_TASKS,
    check_right_answers,
    image_facts,
    load_image_task,
    prepared_task,
    read_image_set,
)
from workers.evaluation.overlap import overlapping
from workers.evaluation.references import lack_of_entropy, lack_of_references
from workers.evaluation.sample_texts import sample_texts
from workers.evaluation.task_reader import reader_of
from workers.evaluation.tasks import build_task, check_task
from workers.file_access import FileAccess
from workers.models.family import ResolvedFamily, resolve_family
from workers.types import TaskSpec


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "cache"))


def spec_of(place: Path, **changes: Any) -> TaskSpec:
    task = {"images": str(place), "head": "a", **changes.pop("task", {})}
    return replace(TaskSpec(task, "acc", content=reader_of(task).content(task)), **changes)


def test_a_folder_has_a_directory_for_each_class(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", per_class=6)
    info = check_task(spec_of(folder))
    assert (info.num_samples, info.output_type, info.options) == (18, "image_classification", CLASSES)
    texts = sample_texts(spec_of(folder), 0, 18)
    assert sorted(texts) == [(str(f), f.parent.name) for f in sorted(folder.glob("*/*.png"))]
    # Every beginning has the classes in proportion.
    assert Counter(answer for _, answer in texts[:9]) == dict.fromkeys(CLASSES, 3)
    assert texts[4:7] == sample_texts(spec_of(folder), 4, 7)
    assert texts != sample_texts(spec_of(folder, permutation_seed=1), 0, 18)


def test_lines_name_the_same_images(tmp_path: Path) -> None:
    """JSONL files with the names of classes, and with indices, have the samples of the folder."""
    folder = image_folder(tmp_path / "images")
    named = read_image_set({"images": str(image_lines(tmp_path / "named.jsonl", folder)), "head": "a"})
    indexed = read_image_set({"images": str(image_lines(tmp_path / "i.jsonl", folder, indices=True)), "head": "a"})
    whole = read_image_set({"images": str(folder), "head": "a"})
    assert named.digests == indexed.digests == whole.digests
    assert [named.class_of(each) for each in named.samples] == [whole.class_of(each) for each in whole.samples]
    assert indexed.classes is None
    assert [each.label for each in indexed.samples] == [each.label for each in whole.samples]


def test_keys_of_lines_can_be_chosen(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", per_class=1)
    rows = [{"file": f"images/{name}/000.png", "kind": name} for name in CLASSES]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"images": str(tmp_path / "d.jsonl"), "head": "a", "image": "file", "label": "kind"}
    assert [each.file for each in read_image_set(task).samples] == [folder / name / "000.png" for name in CLASSES]


def test_changed_images_are_noticed(tmp_path: Path) -> None:
    """One other image, or a label more, is another task; a task that was checked before is then refused."""
    folder = image_folder(tmp_path / "images")
    spec = spec_of(folder)
    load_image_task(spec)
    image = folder / "line" / "000.png"
    image.write_bytes((folder / "line" / "001.png").read_bytes())
    with pytest.raises(InvalidTask, match="has changed since the study was checked"):
        load_image_task(spec)
    assert spec_of(folder).digest != spec.digest


def broken(folder: Path) -> None:
    file = folder / "line" / "002.png"
    file.write_bytes(file.read_bytes()[:60])


def foreign(folder: Path) -> None:
    (folder / "line" / "002.png").write_text("not an image")


def lines(*rows: Any) -> Callable[[Path], object]:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return lambda folder: (folder.parent / "d.jsonl").write_text(text)


WRONG: Mapping[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "broken": (broken, {}, r"line/002\.png: is a broken image"),
    "foreign": (foreign, {}, r"line/002\.png: is no image that Pillow can read"),
    "other file": (lambda f: (f / "line" / "a.txt").write_text(""), {}, r"a\.txt: is no image by its name; expected"),
    "class": (
        lambda f: (f / "dot").mkdir(),
        {"classes": [*CLASSES]},
        "has a directory 'dot', which `classes` does not",
    ),
    "twice": (lambda f: None, {"classes": ["line", "line"]}, "classes names 'line' twice"),
    "key": (
        lambda f: None,
        {"prompt": "x"},
        "unknown key 'prompt'; known are classes, config, head, image, images, label, split, templates",
    ),
    "no head": (lambda f: None, {"head": ""}, "names no head; give the alias of the model whose head scores it"),
    "metric": (
        lambda f: None,
        {"metric": "exact_match"},
        "unknown metric 'exact_match'; an image task has acc, acc_top5, entropy",
    ),
    "split": (lambda f: None, {"split": "test"}, "split is for tasks of text; leave it out"),
    "missing": (lines({"image": "none.png", "label": 0}), {}, r"none\.png: cannot be read"),
    "no labels": (
        lines({"image": "a.png"}),
        {},
        r"which acc needs; add them .*, or the key 'label' of",
    ),
    "some labels": (
        lines({"image": "a.png"}, {"image": "b.png", "label": 0}),
        {"metric": "entropy"},
        "1 of 2 lines have no 'label'; expected one in all lines, or in none",
    ),
    "a label of nothing": (
        lines({"image": "a.png", "label": None}),
        {},
        "line 1: 'label' is None; expected the name of a class or the index",
    ),
    "a flag": (lines({"image": "a.png", "label": True}), {}, "line 1: 'label' is True; expected the name of a class"),
    "mixed": (lines({"image": "a", "label": 0}, {"image": "b", "label": "x"}), {}, "some labels are numbers, and some"),
    "negative": (lines({"image": "a", "label": -1}), {}, "has the label -1; expected 0 to"),
    "beyond": (lines({"image": "a", "label": 3}), {"classes": [*CLASSES]}, "has the label 3; expected 0 to 2"),
    "unknown": (
        lines({"image": "a", "label": "x"}),
        {"classes": [*CLASSES]},
        "the label 'x', which `classes` does not",
    ),
    "none": (lines(), {}, "has no images; expected a directory for each class, or lines"),
    "beside": (
        lambda f: (f / "one.png").write_bytes((f / "line" / "000.png").read_bytes()),
        {},
        r"images/one\.png: is an image beside directories of classes, such as 'circle'; expected each image in the",
    ),
    "a name in another encoding": (
        lambda f: (f / "line" / os.fsdecode(b"\xfc.png")).write_bytes(b""),
        {},
        r"line: has a name that is not UTF-8, '\\udcfc\.png'; rename it",
    ),
    "a null character": (
        lines({"image": "a\0.png", "label": 0}),
        {},
        r"line 1: 'image' is 'a\\x00\.png'; expected the path of an image",
    ),
    "half a character": (
        lines({"image": "a", "label": "\ud800"}),
        {},
        r"line 1: 'label' is '\\ud800'; expected the name",
    ),
    "nested": (
        lambda f: (f.parent / "d.jsonl").write_text("[" * 100_000),
        {},
        "line 1: is not JSON: maximum recursion depth",
    ),
    "Latin-1": (
        lambda f: (f.parent / "d.jsonl").write_bytes('{"image": "a", "label": "ü"}'.encode("latin-1")),
        {},
        "line 1: is not JSON: 'utf-8' codec can't decode",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_tasks_that_cannot_be_used_say_why(case: str, tmp_path: Path) -> None:
    """The message names the file or the line, and what is expected."""
    spoil, options, message = WRONG[case]
    folder = image_folder(tmp_path / "images", per_class=3)
    spoil(folder)
    of_spec = {key: options[key] for key in ("metric", "split") if key in options}
    of_task = {key: value for key, value in options.items() if key not in of_spec}
    place = tmp_path / "d.jsonl" if (tmp_path / "d.jsonl").exists() else folder
    task = {"images": str(place), "head": "a", **of_task}
    with pytest.raises(InvalidTask, match=message):
        check_task(replace(TaskSpec(task, "acc"), **of_spec))


def test_lines_end_at_line_feeds(tmp_path: Path) -> None:
    """A byte order mark, and characters that end lines for str.splitlines, do not divide or spoil lines of JSON."""
    image_folder(tmp_path / "images", per_class=1)
    rows = [{"image": "images/line/000.png", "label": name} for name in ("a\u2028b", "c\x85d", "e")]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "d.jsonl").write_bytes(text.encode("utf-8-sig"))
    found = read_image_set({"images": str(tmp_path / "d.jsonl"), "head": "a"})
    assert [found.class_of(sample) for sample in found.samples] == ["a\u2028b", "c\x85d", "e"]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_of_too_many_pixels_are_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of more pixels than Pillow accepts are refused, in every thread, without changing filters of warnings."""
    folder = image_folder(tmp_path / "images", per_class=20)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 28 * 28 - 1)
    before = list(warnings.filters)
    with pytest.raises(InvalidTask, match=r"has 28 x 28 pixels; expected at most 783.*; and 57 more images"):
        check_task(spec_of(folder))
    assert warnings.filters == before


def test_no_other_files_are_read(tmp_path: Path) -> None:
    """Images outside the directories that may be read are refused, also behind links and paths of a JSONL file."""
    folder = image_folder(tmp_path / "open" / "images", per_class=2)
    secret = image_folder(tmp_path / "secret", per_class=1) / "line" / "000.png"
    access = FileAccess(readable=(str(tmp_path / "open"),))
    load_image_task(spec_of(folder, access=access))
    lines({"image": "../secret/line/000.png", "label": 0})(folder)
    with pytest.raises(InvalidTask, match=r"secret/line/000\.png"):
        load_image_task(TaskSpec({"images": str(folder.parent / "d.jsonl"), "head": "a"}, "acc", access=access))
    with pytest.raises(InvalidTask, match=r"secret/line/000\.png"):  # nor are they hashed
        reader_of({"images": ""}).content({"images": str(folder.parent / "d.jsonl"), "head": "a"}, access)
    (folder / "line" / "link.png").symlink_to(secret)
    with pytest.raises(InvalidTask, match=r"link\.png"):
        load_image_task(TaskSpec({"images": str(folder), "head": "a"}, "acc", access=access))


@pytest.fixture
def sources(tmp_path: Path) -> ResolvedFamily:
    base = tiny_vit(tmp_path / "base", classes=None)
    experts = {
        "a": tiny_vit(tmp_path / "a", 1, classes=("square", "circle", "line")),
        "b": tiny_vit(tmp_path / "b", 2, classes=("no", "yes")),
    }
    return resolve_family(base, experts)


def test_labels_are_outputs_of_the_head(sources: ResolvedFamily, tmp_path: Path) -> None:
    """Each sample's class is found in the head of the model that the task names, by name or in the stated order."""
    folder = image_folder(tmp_path / "images")
    prepared = prepared_task(spec_of(folder), sources)
    assert prepared.names == ("square", "circle", "line")
    right = [answer for _, answer in sample_texts(prepared.task.spec, 0, 18)]
    assert [prepared.names[output] for output in prepared.outputs] == right
    german = image_folder(tmp_path / "bilder", classes=("Kreis", "Linie", "Quadrat"))
    stated = prepared_task(spec_of(german, task={"classes": ["Quadrat", "Kreis", "Linie"]}), sources)
    assert stated.names == ("Quadrat", "Kreis", "Linie")
    answers = [answer for _, answer in sample_texts(stated.task.spec, 0, 18)]
    assert [stated.names[output] for output in stated.outputs] == answers
    assert set(answers) == {"Kreis", "Linie", "Quadrat"}
    with pytest.raises(InvalidTask, match="has the names of the head of 'a' in another order"):
        prepared_task(spec_of(folder, task={"classes": ["line", "square", "circle"]}), sources)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"head": "b"}, "has 3 classes, the head of 'b' has 2"),
        ({"head": "c"}, "head 'c' is no model; expected one of a, b"),
        ({"head": "base"}, "the model 'base' has no head; those with one are a, b"),
    ],
)
def test_heads_must_fit_their_tasks(
    task: dict[str, str], message: str, sources: ResolvedFamily, tmp_path: Path
) -> None:
    with pytest.raises(InvalidTask, match=message) as caught:
        prepared_task(spec_of(image_folder(tmp_path / "images"), task=task), sources)
    assert caught.value.field == "task.head"


def test_metrics_that_are_one_for_every_model_are_refused(sources: ResolvedFamily, tmp_path: Path) -> None:
    """The right class is always among the five likeliest of three, so acc_top5 would compare nothing."""
    folder = image_folder(tmp_path / "images")
    IMAGE_TASKS.check_models(spec_of(folder), sources)
    with pytest.raises(InvalidTask, match="acc_top5 is 1 for every model, because the head of 'a' has 3 classes"):
        IMAGE_TASKS.check_models(spec_of(folder, metric="acc_top5"), sources)


def test_indices_must_be_outputs_of_the_head(sources: ResolvedFamily, tmp_path: Path) -> None:
    file = image_lines(tmp_path / "d.jsonl", image_folder(tmp_path / "images"), indices=True)
    assert prepared_task(spec_of(file), sources).names == ("square", "circle", "line")
    with pytest.raises(
        InvalidTask, match="has the label 2, the head of 'b' has 2 classes; expected labels from 0 to 1"
    ):
        prepared_task(spec_of(file, task={"head": "b"}), sources)


def test_equal_images_of_two_tasks_overlap(tmp_path: Path) -> None:
    """Overlaps between tasks are found by the images' contents, whatever their names."""
    search = image_folder(tmp_path / "search", seed=0)
    other = image_folder(tmp_path / "other", seed=1)
    (other / "line" / "000.png").write_bytes((search / "circle" / "003.png").read_bytes())
    found = overlapping({"s": spec_of(search)}, {"o": spec_of(other)})["o"]
    assert (found.num_items, found.num_exact, found.examples) == (18, 1, ("line/000.png",))


def test_images_have_no_prompts(tmp_path: Path) -> None:
    spec = spec_of(image_folder(tmp_path / "images", per_class=1))
    with pytest.raises(InvalidTask, match="a task of the modality image has no prompts; expected a task of text"):
        build_task(spec)
    assert lack_of_references(spec) is None, "labels are the right answers"


def test_images_without_labels(tmp_path: Path) -> None:
    """A folder of images, or lines without labels, are tasks whose metric is the entropy; they have no references."""
    labelled = image_folder(tmp_path / "labelled", per_class=2)
    folder = tmp_path / "plain"
    folder.mkdir()
    for number, file in enumerate(sorted(labelled.rglob("*.png"))):
        (folder / f"{number}.png").write_bytes(file.read_bytes())
    file = tmp_path / "plain.jsonl"
    file.write_text("".join(json.dumps({"image": f"plain/{number}.png"}) + "\n" for number in range(6)))
    specs = [TaskSpec({"images": str(place), "head": "a"}, "entropy") for place in (folder, file, labelled)]
    images = [load_image_task(spec).images for spec in specs]
    assert [each.is_labelled for each in images] == [False, False, True]
    assert images[0].digests == images[1].digests == images[2].digests
    assert [texts[1] for texts in IMAGE_TASKS.texts(specs[0], 0, 6)] == [None] * 6, "no right answer is stored"
    info = IMAGE_TASKS.check(specs[0])
    assert (info.num_samples, info.higher_is_better) == (6, False)
    assert [lack_of_references(spec) for spec in specs] == ["its images have no labels"] * 2 + [None]
    assert [lack_of_entropy(spec) for spec in specs] == [None] * 3
    assert image_facts(str(folder)).classes == {}
    with pytest.raises(InvalidTask, match="have no labels, which acc_top5 needs"):
        load_image_task(TaskSpec({"images": str(folder), "head": "a"}, "acc_top5"))
    with pytest.raises(InvalidTask, match="the metric entropy knows no right answers; use acc or acc_top5"):
        check_right_answers(load_image_task(specs[2]))
