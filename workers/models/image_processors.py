"""Image processors, which convert image files to a model's input by resizing, rescaling and normalisation.

Transformers' processors that use Pillow are loaded even if torchvision is installed, so that scores do not depend on
the installed packages.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import InvalidModel
from workers.models.config import read_config

if TYPE_CHECKING:
    import torch

__all__ = [
    "PROCESSOR_FILES",
    "check_processor",
    "decoded",
    "load_processor",
    "needed_size",
    "pixels_of",
    "processor_differences",
]

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

# Fields that name classes, and do not change what is computed.
NAMES = ("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class")


def load_processor(directory: str | Path) -> Any:
    """Load the image processor of the model in `directory`, in its version that uses Pillow.

    Raises InvalidModel if the directory has no image processor, or if it cannot be loaded. No code from the directory
    is run.
    """
    path = Path(directory)
    if not _has_processor(path):
        raise InvalidModel((f"{path}: no {PROCESSOR_FILES[0]}; expected the settings of an image processor",))
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise InvalidModel((f"{path}: its image processor cannot be loaded: {error}",)) from error


def check_processor(directory: str | Path) -> None:
    """Check that the image processor in `directory` gives images of the size that the model's configuration states.

    The processor is given an image that is neither square nor of this size. A processor that does not resize must leave
    images of this size as they are (`needed_size`). Raises InvalidModel if the result has another size, or if the
    directory has no image processor that can be used.
    """
    path = Path(directory)
    processor = load_processor(path)
    wanted = read_config(path).get("image_size")
    if not isinstance(wanted, int):
        return
    given, fitting = _other_size(wanted), (wanted, wanted)
    try:
        found = _size_of(processor, given)
        is_right = found == fitting or (found == given and _size_of(processor, fitting) == fitting)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise InvalidModel((f"{path}: its image processor cannot read images: {error}",)) from error
    if not is_right:
        raise InvalidModel(
            (
                f"{path}: its image processor gives images of {found[0]} x {found[1]} for one of {given[0]} x "
                f"{given[1]}, config.json states image_size {wanted}; expected {wanted} x {wanted} for every image",
            )
        )


def needed_size(directory: str | Path) -> int | None:
    """The height and width that images must have for the model in `directory`, in pixels.

    The result is None if the model's image processor brings every image to the size that the model reads. Raises
    InvalidModel if there is no image processor that can be used.
    """
    wanted = read_config(directory).get("image_size")
    if not isinstance(wanted, int):
        return None
    given = _other_size(wanted)
    return wanted if _size_of(load_processor(directory), given) == given else None


def _other_size(size: int) -> tuple[int, int]:
    """Height and width of an image that is not square, and has none of its sides equal to `size`."""
    return size + 1, 2 * size + 3


def _size_of(processor: Any, given: tuple[int, int]) -> tuple[int, int]:
    """Height and width to which a processor brings an image of the height and width `given`."""
    from PIL import Image

    height, width = pixels_of(processor, [Image.new("RGB", given[::-1])])[0].shape[1:]
    return height, width


def processor_differences(base: Path, expert: Path) -> Iterator[str]:
    """Yield an error message for each setting that differs between the image processors of a base and an expert.

    Merges use the base's processor, so an expert with another processor would get other inputs than in its training. An
    expert without a processor is assumed to have the base's processor.
    """
    if not (_has_processor(base) and _has_processor(expert)) or _stated(base) == _stated(expert):
        return
    ours, theirs = _settings(base), _settings(expert)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield (
                f"{expert}: its image processor has {name} {theirs.get(name)!r}; the base's has {ours.get(name)!r}, "
                "and merges read images as the base does"
            )


def decoded(content: bytes, where: str) -> Any:
    """Decode the bytes of an image file, as a PIL image with three channels (RGB).

    Raises ValueError if the bytes are not a complete image; the message begins with `where`, the file's name.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            # Pillow warns of such images, and filters of warnings are shared by the threads that decode.
            most = Image.MAX_IMAGE_PIXELS
            if most is not None and image.width * image.height > most:
                raise ValueError(f"has {image.width} x {image.height} pixels; expected at most {most}")
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"{where}: is no image that Pillow can read") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{where}: is a broken image: {error}") from error


def pixels_of(processor: Any, images: Sequence[Any]) -> torch.Tensor:
    """Convert PIL images with `processor` to the model's input [num_images, channels, height, width], in float32."""
    import torch

    found = processor(images=list(images), return_tensors="pt")["pixel_values"]
    return found.to(torch.float32).contiguous()  # type: ignore[no-any-return]


def _has_processor(directory: Path) -> bool:
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def _stated(directory: Path) -> Any:
    """Settings in the file of a model's image processor, without names of classes; None if it cannot be read."""
    try:
        file = next(directory / name for name in PROCESSOR_FILES if (directory / name).is_file())
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, StopIteration):
        return None
    return {key: value for key, value in document.items() if key not in NAMES} if isinstance(document, dict) else None


def _settings(directory: Path) -> dict[str, Any]:
    """All settings of a model's image processor, defaults included, as plain data."""
    document = json.loads(load_processor(directory).to_json_string())
    return {key: value for key, value in document.items() if key not in NAMES}
