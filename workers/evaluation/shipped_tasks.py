"""The evaluation tasks shipped with this project, and the download of a task's data for machines without a network."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from search_spaces.study.image_suites import IMAGE_SUITES, ImageSuite
from workers.errors import InvalidTask
from workers.evaluation.data_sets import is_on_hub, load, local_copy, place_of
from workers.task_pack import pack_dir
from workers.types import TaskSpec

__all__ = ["FetchedData", "ShippedTask", "fetch", "shipped_tasks"]


@dataclass(frozen=True)
class ShippedTask:
    """Facts about a shipped evaluation task, from its YAML file.

    - `sizes`: maps each split to its number of samples, or to a text about its size
    - `metric`: the metric that the task's paper reports
    - `data`: the names of the task's data sets
    - `places`: for each data set, the directory of this machine that has at least a part of it, or None; only loading
      shows whether a data set is complete
    """

    name: str
    paper: str
    licence: str
    sizes: Mapping[str, int | str]
    metric: str
    data: tuple[str, ...]
    places: Mapping[str, str | None]

    @property
    def is_here(self) -> bool:
        return all(self.places.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_here": self.is_here}


@dataclass(frozen=True)
class FetchedData:
    """A data set on this machine, with the number of samples of each split.

    `data` is the name of the data set, and `part` is its configuration. `part` is None if the data set has only one
    configuration.
    """

    data: str
    part: str | None
    sizes: Mapping[str, int]


def shipped_tasks() -> tuple[ShippedTask, ...]:
    """List all shipped tasks, sorted by paper and name, without loading them or asking the hub."""
    of_text = map(_shipped, sorted(pack_dir().glob("*/*.yaml")))
    return (*(_of_images(name, suite) for name, suite in IMAGE_SUITES.items()), *of_text)


def fetch(task: str) -> tuple[FetchedData, ...]:
    """Download the data of a task, given by its name or YAML file, and check that they load without the hub.

    The result contains an entry for each data set of the task. The task's code is not run. Data in the user's directory
    (module `data_sets`) are not downloaded. Raises InvalidTask if the task is unknown, if its data cannot be
    downloaded, or if they cannot be loaded afterwards without the hub.
    """
    from workers.evaluation.lm_eval_tasks import prepare

    if (suite := IMAGE_SUITES.get(task)) is not None:
        return (_fetched_images(suite),)
    spec = TaskSpec(task, "")  # the metric does not matter for data
    found = prepare(spec).datasets
    with _offline():
        try:
            prepare(spec)
        except InvalidTask:
            _download({json.loads(key)[0] for key in found})
            prepare(spec)
    return tuple(
        FetchedData(path, part, {str(split): len(rows) for split, rows in found[key].items()})
        for key in found
        for path, part, _ in [json.loads(key)]
    )


def _of_images(name: str, suite: ImageSuite) -> ShippedTask:
    place = place_of(suite.data)
    places = {suite.data: None if place is None else str(place)}
    return ShippedTask(name, suite.paper, suite.licence, suite.sizes, "acc", (suite.data,), places)


def _fetched_images(suite: ImageSuite) -> FetchedData:
    """Download the data set of an image task, and check that it loads without the hub."""
    import datasets

    def loaded() -> Mapping[str, Any]:
        found: Mapping[str, Any] = load(datasets.load_dataset, suite.data, suite.config, {})
        return found

    with _offline():
        try:
            found = loaded()
        except InvalidTask:
            _download({suite.data})
            found = loaded()
    return FetchedData(suite.data, suite.config, {str(split): len(rows) for split, rows in found.items()})


def _shipped(file: Path) -> ShippedTask:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML loader that reads `!function` tags as plain text."""

    Loader.add_constructor("!function", lambda loader, node: str(node.value))
    facts = yaml.load(file.read_text(), Loader)["metadata"]
    data = tuple(facts["data"])
    return ShippedTask(
        name=file.stem,
        paper=facts["paper"],
        licence=facts["licence"],
        sizes=facts["sizes"],
        metric=facts["metric"],
        data=data,
        places={path: None if (place := place_of(path)) is None else str(place) for path in data},
    )


def _download(paths: set[str]) -> None:
    """Download all files of the data sets named in `paths` into the cache of the hub's client.

    The functions of the module `data_sets` find the files there.
    """
    from huggingface_hub import constants, snapshot_download

    constants.HF_HUB_OFFLINE = False
    try:
        for path in paths:
            if is_on_hub(path) and local_copy(path) is None:
                snapshot_download(path, repo_type="dataset")
    except Exception as error:  # raised by the hub's client, by its HTTP library, or by the system
        raise InvalidTask(f"{path}: cannot be downloaded: {type(error).__name__}: {error}") from error
    finally:
        constants.HF_HUB_OFFLINE = True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Context manager that keeps the hub client and the package `datasets` from using the network."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
