"""Small pictures of a task's images, for people who read reports and pages.

A picture is a copy of the image that the model's processor gets (RGB, not rotated by the file's metadata). Its longer
side is reduced to SIDE pixels; smaller images are not enlarged. Pictures are WebP files, without metadata. A picture is
compressed without loss if the image is small (LOSSLESS_SIDE) and the result fits into MAX_BYTES.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from workers.errors import InvalidTask
from workers.evaluation.image_tasks import ImageTask
from workers.models.image_processors import decoded
from workers.types import SamplePictures

__all__ = ["MAX_BYTES", "SIDE", "picture_of", "pictures_of"]

# Pixels on the longer side of a picture, and the largest side of images that are kept without loss.
SIDE = 112
LOSSLESS_SIDE = 48
# Bytes of a picture; a picture that would have more bytes is encoded with less quality.
MAX_BYTES = 8 * 2**10
QUALITIES = (80, 50, 20)
# Threads that decode images; each holds a whole image, which may have hundreds of MB.
NUM_THREADS = 4


def pictures_of(task: ImageTask, start: int, stop: int) -> SamplePictures:
    """Small pictures of the samples [start, stop) of a task, in the order of scoring.

    A picture is None if its image cannot be read or decoded, or if the picture would be larger than MAX_BYTES.
    """
    samples = [task.images.samples[index] for index in task.order[start:stop]]

    def picture(sample: Any) -> bytes | None:
        try:
            return picture_of(decoded(task.images.read(sample), str(sample.file)))
        except (InvalidTask, ValueError):
            return None

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return tuple(threads.map(picture, samples))


def picture_of(image: Any) -> bytes | None:
    """Encode a PIL image in RGB as a small WebP file; None if the file would have more than MAX_BYTES bytes.

    The given image itself is made smaller, because a copy of a large image takes much memory.
    """
    is_small = max(image.size) <= LOSSLESS_SIDE
    image.thumbnail((SIDE, SIDE))
    settings: list[dict[str, Any]] = [{"quality": quality} for quality in QUALITIES]
    if is_small:
        settings.insert(0, {"lossless": True})
    return _first_that_fits(_encoded(image, each) for each in settings)


def _first_that_fits(pictures: Iterable[bytes]) -> bytes | None:
    return next((picture for picture in pictures if len(picture) <= MAX_BYTES), None)


def _encoded(image: Any, settings: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", icc_profile=b"", exif=b"", xmp=b"", **settings)
    return file.getvalue()
