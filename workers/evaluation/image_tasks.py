"""Image tasks: folders with a directory for each class, and JSONL files that name images and their labels.

The description of a task in a study file has these keys:

- `images`: the folder, the JSONL file, or hub:OWNER/NAME, a data set that the module `data_sets` finds
- `split`, `config`: the split of a data set and, if the data set has several configurations, the configuration
- `head`: the alias of the model whose classification head scores the task
- `classes`: names of the classes in the order of the head's outputs; without this key, classes are matched to outputs
  by the names in the head's configuration or, if the configuration has no names, in alphabetical order
- `templates`: texts that describe a class to the text tower of CLIP, with {} in place of the class's name
- `image`, `label`: in a JSONL file, the keys of a line's image path and label; in a data set, the names of the two
  columns. Paths are relative to the file's directory. A label is a class's name or the index of an output.

Images without labels are files of the folder itself, or lines of a JSONL file without the key of the label.

The metrics are `acc` (the right class has the largest logit), `acc_top5` (the right class is among the five classes
with the largest logits), and `entropy`, which needs no labels: the entropy of the predicted classes, divided by the
entropy of equally likely classes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.study.image_suites import ENTROPY, HUB
from workers.cache import cached
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import permutation
from workers.evaluation.data_sets import load
from workers.evaluation.sample_facts import Item, Lengths
from workers.evaluation.task_loading import guarded_data_sets
from workers.file_access import FileAccess
from workers.models.image_processors import decoded, needed_size
from workers.models.task_heads import TaskHead, has_zero_shot_heads, task_heads, zero_shot_head
from workers.models.zero_shot import check_templates
from workers.object_store import is_object_url
from workers.types import SampleTexts, TaskInfo, TaskSpec, digest_of

if TYPE_CHECKING:
    from workers.evaluation.prompts import Prompts
    from workers.models.family import ResolvedFamily

__all__ = [
    "ENTROPY",
    "IMAGE_METRICS",
    "IMAGE_TASKS",
    "NO_LABEL",
    "ImageFacts",
    "ImageSample",
    "ImageSet",
    "ImageTask",
    "ImageTasks",
    "PreparedTask",
    "check_decodable",
    "check_right_answers",
    "check_sizes",
    "image_facts",
    "load_image_task",
    "prepared_task",
    "read_image_set",
    "texts_of",
]

# The number of largest logits among which the right class must be, by metric.
IMAGE_METRICS: Mapping[str, int] = {"acc": 1, "acc_top5": 5}
# The label of an image without a label.
NO_LABEL = -1
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
JSONL = (".jsonl", ".ndjson")
KEYS = frozenset({"images", "split", "config", "head", "classes", "templates", "image", "label"})
# Options of a task's entry in the study file that only text tasks have.
OF_TEXT = ("filter", "split", "num_fewshot", "max_tokens", "until", "template")
NUM_THREADS = 8
# Digests of image files by their state, as a study's checks read each task several times; about 400 bytes an entry.
MOST_DIGESTS = 1 << 18
_digests: dict[tuple[str, int, int, int], str] = {}
# Digests of the images of data sets that contain them, by the state of the data set (`_state_of`).
MOST_DATA_SETS = 64
_digests_of_rows: dict[Hashable, tuple[str, ...]] = {}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ImageSample:
    """One image file and its label.

    `name` is the sample's path within the task's data. An image of a hub data set has no file of its own: `row` is then
    the index of its row, and `file` is only a name for messages. `label` is an index in the set's `classes`. If the set
    has no `classes`, `label` is the index of an output of the classification head. If the image has no label, `label`
    is NO_LABEL.
    """

    file: Path
    name: str
    label: int
    row: int | None = None


@dataclass(frozen=True)
class ImageSet:
    """The data of an image task: images, with or without labels.

    The images of a folder are in the order of their names; the images of a JSONL file or data set are in the order of
    its rows. `classes` has the names of the classes; None if labels are the indices of a head's outputs. `is_ordered`
    says whether classes are in the order of the head's outputs. `where` is the folder, file or data set, for messages.
    The images of a hub data set are in the column `column` of its `rows`. `state` is a value that changes when the rows
    change, for caching; None if it is unknown.
    """

    samples: tuple[ImageSample, ...]
    classes: tuple[str, ...] | None
    is_ordered: bool
    where: str
    rows: Sequence[Mapping[str, Any]] = ()
    column: str = "image"
    may_read_files: bool = True
    state: Hashable | None = None

    @property
    def is_labelled(self) -> bool:
        """Whether the images have labels: either all images have a label, or no image has one."""
        return all(sample.label != NO_LABEL for sample in self.samples)

    def class_of(self, sample: ImageSample) -> str:
        """Name or index of a sample's class; "" if the sample has no label."""
        if sample.label == NO_LABEL:
            return ""
        return str(sample.label) if self.classes is None else self.classes[sample.label]

    def read(self, sample: ImageSample) -> bytes:
        """Read the encoded image of a sample, as bytes. Raises InvalidTask, with the file's name, if reading fails."""
        file = sample.file
        if sample.row is not None:
            stored = self._stored(sample.row)
            if stored.get("bytes") is not None:
                return bytes(stored["bytes"])
            if not stored.get("path") or not self.may_read_files:
                raise InvalidTask(f"{sample.file}: the data set does not contain the image itself", "task.images")
            file = Path(stored["path"])
        try:
            return file.read_bytes()
        except OSError as error:
            raise InvalidTask(f"{sample.file}: cannot be read ({error.strerror})", "task.images") from error

    def _stored(self, row: int) -> Mapping[str, Any]:
        """The image in a row of a data set: an object with its bytes, or with the path of a file."""
        return self.rows[row][self.column] or {}

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """The sha256 (hex) of each image's bytes. Raises InvalidTask if an image cannot be read."""
        known = None if self.state is None else _digests_of_rows.get(self.state)
        if known is not None:
            return known
        are_files: list[ImageSample] = []

        def digest(sample: ImageSample) -> str:
            if sample.row is not None:
                if (content := self._stored(sample.row).get("bytes")) is not None:
                    return hashlib.sha256(content).hexdigest()
                are_files.append(sample)
                return hashlib.sha256(self.read(sample)).hexdigest()
            try:
                found = sample.file.stat()
            except OSError:
                return hashlib.sha256(self.read(sample)).hexdigest()  # says why it cannot be read
            key = (str(sample.file), found.st_mtime_ns, found.st_size, found.st_ino)
            if (known := _digests.get(key)) is None:
                known = hashlib.sha256(self.read(sample)).hexdigest()
                if len(_digests) >= MOST_DIGESTS:
                    _digests.clear()
                _digests[key] = known
            return known

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = tuple(threads.map(digest, self.samples))
        if self.state is not None and not are_files:
            if len(_digests_of_rows) >= MOST_DATA_SETS:
                _digests_of_rows.clear()
            _digests_of_rows[self.state] = found
        return found

    @cached_property
    def content(self) -> str:
        """Digest of the names, classes and bytes of all images."""
        rows = [
            (sample.name, self.class_of(sample), digest)
            for sample, digest in zip(self.samples, self.digests, strict=True)
        ]
        return digest_of([rows, self.classes])


@dataclass(frozen=True)
class ImageTask:
    """An image task whose data have been read: its specification, its images, and the order of scoring.

    Every prefix of the order has all classes in proportion to their numbers of images.
    """

    spec: TaskSpec
    images: ImageSet
    order: tuple[int, ...] = field(repr=False)

    @property
    def head(self) -> str:
        """Alias of the model whose classification head scores the task."""
        assert isinstance(self.spec.task, Mapping)
        return str(self.spec.task["head"])

    @property
    def num_largest(self) -> int:
        """The number k of a top-k accuracy: the right class must be among the k classes with the largest logits.

        The task's metric must not be the entropy.
        """
        return IMAGE_METRICS[self.spec.metric]

    @property
    def is_entropy(self) -> bool:
        """Whether the task's metric is the entropy of the predicted classes."""
        return self.spec.metric == ENTROPY


@dataclass(frozen=True)
class PreparedTask:
    """An image task with the classification head that scores it.

    `outputs` has, for each sample in the order of scoring, the index of the head's output for the right class, or
    NO_LABEL for an image without a label. `names` has the name of each output.
    """

    task: ImageTask
    head: TaskHead
    outputs: tuple[int, ...]
    names: tuple[str, ...]


def read_image_set(task: Mapping[str, Any], access: FileAccess | None = None) -> ImageSet:
    """List the images and labels of an image task, without reading the images.

    `task` describes the task as in a study file. `access` limits the files that may be named; None is no limit. Raises
    InvalidTask, whose message has the file and, for a JSONL file, the line.
    """
    if unknown := sorted(set(task) - KEYS):
        raise InvalidTask(f"image task: unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    if not task.get("head"):
        raise InvalidTask("image task: names no head; give the alias of the model whose head scores it", "task.head")
    place = str(task["images"])
    if task.get("templates") is not None:
        check_templates(tuple(map(str, task["templates"])), where=place)
    stated = tuple(map(str, task["classes"])) if task.get("classes") else None
    if stated is not None and len(set(stated)) < len(stated):
        raise InvalidTask(f"{place}: classes names {_repeated(stated)!r} twice; give each once", "task.classes")
    if place.startswith(HUB):
        return _of_data_set(place, task, stated, access)
    if is_object_url(place):
        message = f"{place}: images are read from directories of this machine; give a folder or a JSONL file"
        raise InvalidTask(message, "task.images")
    _check_access(Path(place), access)
    if Path(place).suffix in JSONL:
        found = _of_lines(Path(place), task, stated, access)
    else:
        found = _of_folder(Path(place), stated, access)
    if not found.samples:
        raise InvalidTask(f"{place}: has no images; expected a directory for each class, or lines", "task.images")
    return found


def load_image_task(spec: TaskSpec) -> ImageTask:
    """Read the data of the image task `spec`, after checking its options.

    Raises InvalidTask if the task cannot be used, or if the data have another digest than `spec.content`.
    """
    assert isinstance(spec.task, Mapping)
    label = str(spec.task.get("images"))
    if spec.metric not in (known := (*IMAGE_METRICS, ENTROPY)):
        message = f"task {label}: unknown metric {spec.metric!r}; an image task has {', '.join(known)}"
        raise InvalidTask(message, "metric")
    for option in OF_TEXT:
        if getattr(spec, option) is not None:
            raise InvalidTask(f"task {label}: {option} is for tasks of text; leave it out", option)
    images = read_image_set(spec.task, spec.access)
    if spec.content is not None and images.content != spec.content:
        raise InvalidTask(f"{label}: has changed since the study was checked; restore it, or start a new study")
    if spec.metric != ENTROPY and not images.is_labelled:
        key = str(spec.task.get("label") or "label")
        message = (
            f"{label}: its images have no labels, which {spec.metric} needs; add them (a directory for each class, or "
            f"the key {key!r} of each line), or write metric: {ENTROPY}"
        )
        raise InvalidTask(message, "metric")
    of_class: dict[str, list[int]] = {}
    for index, sample in enumerate(images.samples):
        of_class.setdefault(images.class_of(sample), []).append(index)
    members = list(of_class.values())
    order = permutation({name: len(each) for name, each in of_class.items()}, seed=spec.permutation_seed)
    return ImageTask(spec, images, tuple(members[group][index] for group, index in order))


def prepared_task(spec: TaskSpec, sources: ResolvedFamily) -> PreparedTask:
    """Read an image task, and find the classification head that it names among the models `sources`.

    Raises InvalidTask if the task cannot be used, no model has the head, or the head has other classes.
    """
    task = load_image_task(spec)
    heads = task_heads(sources.checkpoints)
    where, images = task.images.where, task.images
    if task.head not in sources.checkpoints:
        message = f"{where}: head {task.head!r} is no model; expected one of {', '.join(heads) or 'none has a head'}"
        raise InvalidTask(message, "task.head")
    if sources.base.config.get("model_type") == "clip_vision_model":
        message = f"{where}: the base is a vision tower alone; take the whole CLIP model, whose text tower exports need"
        raise InvalidTask(message, "task.head")
    assert isinstance(spec.task, Mapping)
    templates = spec.task.get("templates")
    if has_zero_shot_heads(sources.checkpoints[task.head]):
        heads = {task.head: zero_shot_head(task.head, images.classes, templates, where=where)}
    elif templates is not None:
        message = f"{where}: templates are for heads of whole CLIP models, which {task.head!r} is not; leave them out"
        raise InvalidTask(message, "task.templates")
    if task.head not in heads:
        having = f"; those with one are {', '.join(heads)}" if heads else ", nor has any other model"
        raise InvalidTask(f"{where}: the model {task.head!r} has no head{having}", "task.head")
    head = heads[task.head]
    if images.classes is None:
        largest = max(sample.label for sample in images.samples)
        if largest >= head.num_classes:
            message = (
                f"{where}: has the label {largest}, the head of {task.head!r} has {head.num_classes} classes; "
                f"expected labels from 0 to {head.num_classes - 1}"
            )
            raise InvalidTask(message, "task.head")
        places: Sequence[int] = range(head.num_classes)
    else:
        places = head.order_of(images.classes, is_ordered=images.is_ordered, where=where)
    names = list(head.labels or map(str, range(head.num_classes)))
    for index, name in enumerate(images.classes or ()):
        names[places[index]] = name
    counts = Counter(names)  # responses name classes, so names must differ
    names = [name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names)]
    outputs = tuple(places[images.samples[index].label] if images.is_labelled else NO_LABEL for index in task.order)
    return PreparedTask(task, head, outputs, tuple(names))


@dataclass(frozen=True)
class ImageFacts:
    """Number of images in a folder or JSONL file: in total, and in each class (by its name or index).

    `classes` is empty if the images have no labels.
    """

    num_images: int
    classes: Mapping[str, int]
    content: str


def image_facts(place: str) -> ImageFacts:
    """Count the images in a folder or JSONL file. Raises InvalidTask if an image cannot be decoded."""
    images = read_image_set({"images": place, "head": "any"})
    check_decodable(images)
    counts = Counter(map(images.class_of, images.samples) if images.is_labelled else ())
    return ImageFacts(len(images.samples), dict(sorted(counts.items())), images.content)


class ImageTasks:
    """Reader of image tasks; it implements the interface `workers.evaluation.task_reader.TaskReader`."""

    def content(self, task: Mapping[str, Any], access: FileAccess | None = None) -> str:
        return read_image_set(task, access).content

    def check(self, spec: TaskSpec) -> TaskInfo:
        images = load_image_task(spec).images
        check_decodable(images)
        return TaskInfo(
            len(images.samples),
            higher_is_better=spec.metric != ENTROPY,
            output_type="image_classification",
            options=images.classes or (),
            value_range=(0.0, 1.0) if spec.metric == ENTROPY else None,
        )

    def texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        task = load_image_task(spec)
        return texts_of(task, start, stop)

    def items(self, spec: TaskSpec) -> Iterator[Item]:
        images = load_image_task(spec).images
        for sample, digest in zip(images.samples, images.digests, strict=True):
            yield Item(sample.name, f"image {digest}")

    def lengths(self, spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
        """Numbers of tokens for one image: the model reads one token for each patch, and one token for the class.

        The model generates nothing; an image counts as one generated token. `cache` is not used.
        """
        size, patch = int(prompts.config["image_size"]), int(prompts.config["patch_size"])
        return Lengths((size // patch) ** 2 + 1, 1.0, 1.0)

    def check_models(self, spec: TaskSpec, sources: ResolvedFamily) -> None:
        prepared = prepared_task(spec, sources)
        if (size := needed_size(sources.result_dir)) is not None:
            check_sizes(prepared.task.images, size)
        largest = IMAGE_METRICS.get(spec.metric, 0)
        if prepared.head.num_classes <= largest:
            raise InvalidTask(
                f"{prepared.task.images.where}: {spec.metric} is 1 for every model, because the head of "
                f"{prepared.head.alias!r} has {prepared.head.num_classes} classes; expected at least {largest + 1}",
                "metric",
            )

    def lack_of_references(self, spec: TaskSpec) -> str | None:
        return None if load_image_task(spec).images.is_labelled else "its images have no labels"

    def lack_of_entropy(self, spec: TaskSpec) -> str | None:
        load_image_task(spec)
        return None


IMAGE_TASKS = ImageTasks()


def check_right_answers(task: ImageTask) -> None:
    """Raise InvalidTask if the task's metric is the entropy, which does not say which answers are right."""
    if task.is_entropy:
        message = f"{task.images.where}: the metric {ENTROPY} knows no right answers; use {' or '.join(IMAGE_METRICS)}"
        raise InvalidTask(message, "metric")


def texts_of(task: ImageTask, start: int, stop: int) -> SampleTexts:
    """File name and right class of the samples [start, stop) of an image task, in the order of scoring.

    The class is None if the image has no label.
    """
    samples = [task.images.samples[index] for index in task.order[start:stop]]
    return tuple(
        (str(sample.file), None if sample.label == NO_LABEL else task.images.class_of(sample)) for sample in samples
    )


def _of_folder(folder: Path, stated: tuple[str, ...] | None, access: FileAccess | None) -> ImageSet:
    entries = _entries(folder)
    directories = [each for each in entries if each.is_dir()]
    if not directories:
        samples = [ImageSample(_image_file(file, access), file.name, NO_LABEL) for file in entries]
        return ImageSet(tuple(samples), stated, stated is not None, str(folder))
    if loose := [each for each in entries if each.suffix.lower() in SUFFIXES and not each.is_dir()]:
        message = (
            f"{loose[0]}: is an image beside directories of classes, such as {directories[0].name!r}; expected each "
            "image in the directory of its class"
        )
        raise InvalidTask(message, "task.images")
    classes = tuple(each.name for each in directories)
    if stated is not None and (unknown := sorted(set(classes) - set(stated))):
        message = f"{folder}: has a directory {unknown[0]!r}, which `classes` does not name; add it, or remove it"
        raise InvalidTask(message, "task.classes")
    classes = stated or classes
    places = {name: index for index, name in enumerate(classes)}
    samples = []
    for directory in directories:
        _check_access(directory, access)
        for file in _entries(directory):
            name = f"{directory.name}/{file.name}"
            samples.append(ImageSample(_image_file(file, access), name, places[directory.name]))
    return ImageSet(tuple(samples), classes, stated is not None, str(folder))


def _entries(folder: Path) -> list[Path]:
    """Files and directories in `folder` whose names do not begin with a dot, in the order of their names.

    Raises InvalidTask if the folder cannot be read, or a name is not valid UTF-8.
    """
    try:
        found = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise InvalidTask(f"{folder}: cannot be read ({error.strerror})", "task.images") from error
    if (wrong := next((each.name for each in found if not _is_text(each.name)), None)) is not None:
        raise InvalidTask(f"{folder}: has a name that is not UTF-8, {wrong!a}; rename it", "task.images")
    return found


def _is_text(name: str) -> bool:
    """Whether `name` can be stored as a path: it can be written in UTF-8, and contains no null character."""
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def _image_file(file: Path, access: FileAccess | None) -> Path:
    """Return `file`, a file in a folder of images, after checking that it may be read.

    Raises InvalidTask if the name's suffix is not one of SUFFIXES, or if `access` does not allow reading the file.
    """
    if file.suffix.lower() not in SUFFIXES:
        message = f"{file}: is no image by its name; expected one of {', '.join(SUFFIXES)}"
        raise InvalidTask(message, "task.images")
    _check_access(file, access)
    return file


def _of_lines(
    file: Path, task: Mapping[str, Any], stated: tuple[str, ...] | None, access: FileAccess | None
) -> ImageSet:
    if file.exists() and not file.is_file():
        raise InvalidTask(f"{file}: is not a file; expected a JSONL file, or a folder with another name", "task.images")
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise InvalidTask(f"{file}: cannot be read ({error})", "task.images") from error
    rows: list[tuple[str, int | str | None]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, task, where=f"{file}, line {number}"))
    without = sum(label is None for _, label in rows)
    if 0 < without < len(rows):
        key = str(task.get("label") or "label")
        message = f"{file}: {without} of {len(rows)} lines have no {key!r}; expected one in all lines, or in none"
        raise InvalidTask(message, "task.label")
    if without:
        samples = [ImageSample(_accessible(file.parent / name, access), name, NO_LABEL) for name, _ in rows]
        return ImageSet(tuple(samples), stated, stated is not None, str(file))
    names = {label for _, label in rows if isinstance(label, str)}
    if names and len(names) < len({label for _, label in rows}):
        message = f"{file}: some labels are numbers, and some are names, such as {min(names)!r}; give one kind"
        raise InvalidTask(message, "task.label")
    if stated is not None and (unknown := sorted(names - set(stated))):
        message = f"{file}: has the label {unknown[0]!r}, which `classes` does not name; add it, or correct the line"
        raise InvalidTask(message, "task.classes")
    classes = stated or (tuple(sorted(names)) if names else None)
    places = {name: index for index, name in enumerate(classes or ())}
    samples = []
    for name, label in rows:
        assert label is not None
        index = places[label] if isinstance(label, str) else label
        if not 0 <= index < (len(classes) if classes else index + 1):
            message = f"{file}: has the label {label}; expected 0 to {len(classes or ()) - 1}"
            raise InvalidTask(message, "task.label")
        samples.append(ImageSample(_accessible(file.parent / name, access), name, index))
    return ImageSet(tuple(samples), classes, stated is not None, str(file))


def _of_data_set(
    place: str, task: Mapping[str, Any], stated: tuple[str, ...] | None, access: FileAccess | None
) -> ImageSet:
    """List the images and labels of a hub data set, loaded from the first place that has it (module `data_sets`).

    `place` is hub:OWNER/NAME, and `task` is the task's description in the study file. `stated` has the names of the
    classes that the description states, or is None. `access` limits the files that may be read; None is no limit.
    Raises InvalidTask if the data set cannot be used.
    """
    import datasets

    name, image, label = place.removeprefix(HUB), str(task.get("image") or "image"), str(task.get("label") or "label")
    if HUB_NAME.fullmatch(name) is None or os.path.isdir(name):
        raise InvalidTask(f"{place}: is not the name of a data set of the hub; expected {HUB}OWNER/NAME", "task.images")
    split, config = str(task["split"]), None if task.get("config") is None else str(task["config"])
    try:
        with guarded_data_sets(access):
            rows = load(datasets.load_dataset, name, config, {"split": split})
        columns = tuple(rows.features)
        for key, column in (("image", image), ("label", label)):
            if column not in columns:
                message = f"{place}: has no column {column!r}; its columns are {', '.join(columns)}"
                raise InvalidTask(message, f"task.{key}")
        classes = stated or tuple(getattr(rows.features[label], "names", ())) or None
        rows = rows.cast_column(image, datasets.Image(decode=False))
        labels = list(rows[label])
    except InvalidTask:
        raise
    except Exception as error:  # raised by datasets and what it reads with: a split or column that is not as asked
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidTask(f"{place}: its split {split} cannot be read: {reason}", "task.split") from error
    if not labels:
        raise InvalidTask(f"{place}: its split {split} has no images", "task.split")
    are_numbers = all(isinstance(each, int) and each >= 0 for each in labels)
    if not are_numbers or (classes is not None and max(labels) >= len(classes)):
        wanted = "numbers" if classes is None else f"numbers from 0 to {len(classes) - 1}"
        raise InvalidTask(f"{place}: its column {label!r} has other values than {wanted}", "task.label")
    if classes is not None and "%" in split and (found := len(set(labels))) < len(classes):
        raise InvalidTask(
            f"{place}: the slice {split} has images of {found} of {len(classes)} classes, so the data seem to be "
            "sorted by class; take whole splits, or a folder of images",
            "task.split",
        )
    samples = tuple(
        ImageSample(Path(f"{place}/{split}/{number}"), f"{split}/{number}", int(index), row=number)
        for number, index in enumerate(labels)
    )
    where = f"{place} {split}"
    state = _state_of(rows, image)
    return ImageSet(
        samples, classes, stated is not None, where, rows, image, may_read_files=access is None, state=state
    )


def _state_of(rows: Any, column: str) -> Hashable | None:
    """A value that changes when the images in a column of a data set change, for caching; None if unknown.

    It consists of the data set's fingerprint, the column, and the times and sizes of the data set's files. It is
    unknown if the data set was not read from files.
    """
    try:
        files = [(file["filename"], os.stat(file["filename"])) for file in rows.cache_files]
    except OSError:
        return None
    if not files:
        return None
    return rows._fingerprint, column, tuple((name, found.st_mtime_ns, found.st_size) for name, found in files)


def _row(line: bytes, task: Mapping[str, Any], *, where: str) -> tuple[str, int | str | None]:
    """Parse a line of a JSONL file, and return (path of the image, label); the label is None if the line has none.

    `task` may name the keys of the path and the label in the line. `where` names the file and line in messages. Raises
    InvalidTask if the line is malformed.
    """
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidTask(f"{where}: is not JSON: {error}", "task.images") from error
    found: dict[str, Any] = {"label": None}
    for option, kinds in (("image", (str,)), ("label", (int, str))):
        key = str(task.get(option) or option)
        if option == "label" and isinstance(document, dict) and key not in document:
            continue
        value = document.get(key) if isinstance(document, dict) else None
        is_name = not isinstance(value, str) or _is_text(value)
        if not isinstance(value, kinds) or isinstance(value, bool) or not is_name:
            wanted = "the path of an image" if option == "image" else "the name of a class or the index of an output"
            raise InvalidTask(f"{where}: {key!r} is {value!r}; expected {wanted}", f"task.{option}")
        found[option] = value
    return found["image"], found["label"]


def check_decodable(images: ImageSet) -> None:
    """Check that every image can be decoded. Raises InvalidTask, with the names of broken files.

    The result is cached by the images' content.
    """
    key = f"decodable images/1 {images.content}"
    if cached(key) is not None:
        return

    def problem(sample: ImageSample) -> str | None:
        try:
            decoded(images.read(sample), str(sample.file))
        except ValueError as error:
            return str(error)
        return None

    _raise_first(images, problem)
    cached(key, "yes")


def check_sizes(images: ImageSet, size: int) -> None:
    """Raise InvalidTask if an image is broken or has not `size` x `size` pixels; the message names such images."""

    def problem(sample: ImageSample) -> str | None:
        try:
            image = decoded(images.read(sample), str(sample.file))
        except ValueError as error:
            return str(error)
        if image.size == (size, size):
            return None
        return (
            f"{sample.file}: has {image.height} x {image.width} pixels; expected {size} x {size}, because the base's "
            "image processor does not resize images (do_resize)"
        )

    _raise_first(images, problem)


def _raise_first(images: ImageSet, problem: Callable[[ImageSample], str | None]) -> None:
    """Raise InvalidTask if some images have a problem; the message describes the first three of them.

    `problem` returns the description of an image's problem, or None if the image has none.
    """
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        broken = [text for text in threads.map(problem, images.samples) if text is not None]
    if broken:
        rest = f"; and {len(broken) - 3} more images" if len(broken) > 3 else ""
        raise InvalidTask("; ".join(broken[:3]) + rest, "task.images")


def _accessible(path: Path, access: FileAccess | None) -> Path:
    _check_access(path, access)
    return path


def _check_access(path: Path, access: FileAccess | None) -> None:
    if access is not None and (reason := access.refusal(path)) is not None:
        raise InvalidTask(reason, "task.images")


def _repeated(names: tuple[str, ...]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)
