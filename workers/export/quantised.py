"""Quantisation of an exported checkpoint to 4 or 8 bits, in the format of compressed-tensors, which vLLM reads.

Weights of linear layers are rounded to the nearest integer times a scale (RTN). Each group of weights has a scale. Of a
few candidates for the scale, the candidate with the smallest squared error is used. No data are needed. Embeddings,
norms and the output head keep their dtype. Files are read and written one by one, so that memory is needed for only one
file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workers.directories import appearing
from workers.engines.transformers.outlines import linear_layers
from workers.errors import InvalidModel

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

__all__ = ["SCHEMES", "Quantised", "check_quantisable", "quantise"]

# The schemes by name, each the name of a preset of compressed-tensors.
# - int4: weights in 4 bits, a scale for each group of up to 128 weights of a row; activations are not quantised
# - int8: weights in 8 bits, a scale for each row; vLLM quantises activations to 8 bits, a scale for each token
SCHEMES = {"int4": "W4A16", "int8": "INT8"}

# Sizes of groups, of which the largest that divides the rows of all linear layers is used. vLLM's kernels have these.
GROUPS = (128, 64, 32)

# The largest magnitude that is not cut, as shares of that of the group.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Quantised:
    """Result of a quantisation: its scheme and sizes.

    - `scheme`: a key of the constant `SCHEMES`
    - `num_layers`: the number of linear layers that were quantised
    - `group`: the number of weights that share a scale; 0 means all weights of a row
    - `bytes_before`, `bytes_after`: the size of all tensors before and after the quantisation
    - `error`: the root mean square of the errors of quantised weights, divided by the root mean square of the weights
    """

    scheme: str
    num_layers: int
    group: int
    bytes_before: int
    bytes_after: int
    error: float


def quantise(checkpoint: str | Path, out_dir: str | Path, *, scheme: str) -> Quantised:
    """Write the quantised model of a checkpoint to the new directory `out_dir`.

    `checkpoint` is a directory with an exported model. Its files other than weights are copied. `scheme` is a key of
    the constant `SCHEMES`. `config.json` gets the section `quantization_config`, by which vLLM and transformers read
    the files.

    Raises:
        InvalidModel: The model cannot be quantised (function `check_quantisable`), or the files lack the weights of a
            linear layer, or have them under another name or with another shape than transformers.
        FileExistsError: `out_dir` is not empty.
    """
    source, out = Path(checkpoint), Path(out_dir).resolve()
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out}: is not empty; expected a new or empty directory")
    linear, preset, group = _chosen(source, scheme)
    sizes = _Sizes()
    with appearing(out, f"quantised-{scheme}") as directory:
        for file in source.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copyfile(file, directory / file.name)
        weight_map: dict[str, str] = {}
        for file in sorted(source.glob("*.safetensors")):
            tensors = dict(_file_tensors(file, linear, preset, sizes))
            save_file(tensors, directory / file.name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file.name)
        if missed := [name for name in linear if f"{name}.weight_scale" not in weight_map]:
            raise InvalidModel(
                (
                    f"{source}: {len(missed)} of {len(linear)} linear layers of its configuration have no weights of "
                    f"their name and shape in its files, such as {missed[0]}; expected weights for all of them",
                )
            )
        if (source / INDEX).is_file():
            document = {"metadata": {"total_size": sizes.after}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(document, indent=2) + "\n")
        _write_config(directory / "config.json", preset)
    return Quantised(scheme, sizes.num_layers, group, sizes.before, sizes.after, sizes.error)


def check_quantisable(checkpoint: str | Path, *, scheme: str) -> None:
    """Check, by its configuration, that a checkpoint can be quantised; its weights are not read.

    `scheme` is a key of the constant `SCHEMES`. Raises InvalidModel if the model has no linear layers, if no size of
    groups divides the lengths of all rows, or if the model is a mixture of experts, whose experts are not linear
    layers.
    """
    _chosen(Path(checkpoint), scheme)


def _chosen(checkpoint: Path, name: str) -> tuple[dict[str, tuple[int, int]], QuantizationScheme, int]:
    """The shapes of a checkpoint's linear layers, keyed by name, the scheme of quantisation, and its group size.

    `name` is the scheme's key in the constant `SCHEMES`. The group size is the number of weights that share a scale, or
    0 if all weights of a row share one.
    """
    linear = linear_layers(checkpoint)
    return linear, *_scheme(name, linear.values(), checkpoint)


@dataclass
class _Sizes:
    """Sums over the tensors of a checkpoint that is quantised.

    `before` and `after` are the bytes of all tensors before and after. `num_layers` is the number of quantised layers.
    `squared_error` and `squares` are the sums of the squares of the errors and of the weights, over the quantised
    weights.
    """

    before: int = 0
    after: int = 0
    num_layers: int = 0
    squared_error: float = 0.0
    squares: float = 0.0

    @property
    def error(self) -> float:
        return (self.squared_error / self.squares) ** 0.5 if self.squares else 0.0


def _scheme(name: str, shapes: Any, checkpoint: Path) -> tuple[QuantizationScheme, int]:
    """The scheme of quantisation that `name` stands for in `SCHEMES`, and the number of weights that share a scale.

    The number is 0 if all weights of a row share a scale. `shapes` are the shapes (outputs, inputs) of the weights.
    `checkpoint` names the model in messages.
    """
    from compressed_tensors.quantization import preset_name_to_scheme

    if name not in SCHEMES:
        raise ValueError(f"quantise: scheme {name!r}; expected one of {', '.join(SCHEMES)}")
    scheme = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    assert scheme.weights is not None
    if scheme.weights.group_size is None:
        return scheme, 0
    rows = {inputs for _, inputs in shapes}
    group = next((size for size in GROUPS if not any(row % size for row in rows)), None)
    if group is None:
        lengths = ", ".join(map(str, sorted(rows)))
        raise InvalidModel(
            (f"{checkpoint}: linear layers have {lengths} inputs; {name} needs multiples of {GROUPS[-1]}",)
        )
    scheme.weights.group_size = group
    return scheme, group


def _file_tensors(
    file: Path, linear: Mapping[str, tuple[int, int]], scheme: QuantizationScheme, sizes: _Sizes
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all tensors of a file, with quantised weights of linear layers.

    `linear` has the shapes of these weights, keyed by layer. Sizes and errors are added up in `sizes`.
    """
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  it is no dict
            tensor = opened.get_tensor(name)
            sizes.before += tensor.nbytes
            module, _, kind = name.rpartition(".")
            parts = {kind: tensor}
            if kind == "weight" and linear.get(module) == tuple(tensor.shape):
                parts = _compressed(tensor, scheme, sizes)
            for part, value in parts.items():
                sizes.after += value.nbytes
                yield f"{module}.{part}" if module else part, value.contiguous()


def _compressed(weight: torch.Tensor, scheme: QuantizationScheme, sizes: _Sizes) -> dict[str, torch.Tensor]:
    """Quantise a weight [outputs, inputs]; return the tensors that replace it, keyed by name, such as `weight_scale`.

    Names and format are as in the library compressed-tensors. Sizes and errors are added up in `sizes`.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = scheme.weights
    assert arguments is not None
    exact = weight.float()
    groups = exact.reshape(len(exact), -1, arguments.group_size or exact.shape[-1])
    low, high = groups.amin(-1), groups.amax(-1)
    best = torch.full_like(low, torch.inf)
    scales, zeros = calculate_qparams(low, high, arguments)
    for share in SHARES:
        scale, zero = calculate_qparams(low * share, high * share, arguments)
        scale = scale.to(weight.dtype)  # as it is stored
        rounded = fake_quantize(exact, scale.float(), zero, arguments)
        error = (rounded - exact).square().reshape(groups.shape).sum(-1)
        is_better = error < best
        scales, zeros = torch.where(is_better, scale, scales.to(weight.dtype)), torch.where(is_better, zero, zeros)
        best = torch.where(is_better, error, best)
    sizes.squared_error += float(best.sum())
    sizes.squares += float(exact.square().sum())
    sizes.num_layers += 1
    compressor = BaseCompressor.load_from_registry(_format(scheme))
    # The quotients are computed in float32: in bfloat16 they would be rounded more coarsely than to 8 bits.
    state = {"weight": exact, "weight_scale": scales.float(), "weight_zero_point": zeros}
    compressed: dict[str, torch.Tensor] = compressor.compress(state, scheme)
    return compressed | {"weight_scale": scales}


def _format(scheme: QuantizationScheme) -> str:
    """Name of the format of quantised files in compressed-tensors: packed in 32-bit integers, or 8-bit integers."""
    return "int-quantized" if scheme.input_activations is not None else "pack-quantized"


def _write_config(file: Path, scheme: QuantizationScheme) -> None:
    """Add the section `quantization_config`, in the format of compressed-tensors, to a model's config.json."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    configuration = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=_format(scheme),
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
    )
    document = json.loads(file.read_text())
    document["quantization_config"] = {
        "version": compressed_tensors.__version__,
        "quant_method": "compressed-tensors",
        **configuration.model_dump(mode="json", exclude={"quant_method"}),
    }
    file.write_text(json.dumps(document, indent=2) + "\n")
