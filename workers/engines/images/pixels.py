"""Preprocessed images, cached within a limit of memory."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from workers.errors import InvalidTask
from workers.evaluation.image_tasks import ImageTask
from workers.models.image_processors import decoded, load_processor, pixels_of
from workers.models.modalities.image import CACHE_BYTES

__all__ = ["Pixels"]


class Pixels:
    """Reader of images, which preprocesses them with the image processor of the model in `directory`.

    The most recently used preprocessed images are cached by the hash of their files, up to `max_bytes` bytes of float32
    values. Images are decoded in `threads` threads.
    """

    def __init__(self, directory: str, *, max_bytes: int = CACHE_BYTES, threads: int = 4) -> None:
        self._processor = load_processor(directory)
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="images")
        self._known: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def of(self, task: ImageTask, positions: Sequence[int]) -> torch.Tensor:
        """Preprocessed images [num_images, channels, height, width] of a task, in float32.

        `positions` are indices in the order in which the task's samples are scored. Raises InvalidTask, with the file's
        name, if an image cannot be read, or has changed since the task was read.
        """
        indices = [task.order[position] for position in positions]
        return torch.stack(list(self._threads.map(lambda index: self._one(task, index), indices)))

    def _one(self, task: ImageTask, index: int) -> torch.Tensor:
        digest = task.images.digests[index]
        found = self._known.get(digest)
        if found is None:
            found = self._read(task, index, digest)
        self._keep(digest, found)
        return found

    def _read(self, task: ImageTask, index: int, digest: str) -> torch.Tensor:
        sample = task.images.samples[index]
        content = task.images.read(sample)
        if _sha256(content) != digest:
            raise InvalidTask(f"{sample.file}: has changed since the task was read; restore it, or start a new study")
        try:
            return pixels_of(self._processor, [decoded(content, str(sample.file))])[0]
        except ValueError as error:
            raise InvalidTask(str(error), "task.images") from error

    def _keep(self, digest: str, pixels: torch.Tensor) -> None:
        with self._lock:
            if digest not in self._known:
                self._known[digest] = pixels
                self.num_bytes += pixels.nbytes
            self._known.move_to_end(digest)
            while self.num_bytes > self._max_bytes:
                _, oldest = self._known.popitem(last=False)
                self.num_bytes -= oldest.nbytes


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
