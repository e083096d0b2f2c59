"""mergekit's YAML configurations as validated documents.

This module neither locates nor opens models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from search_spaces.methods.mergekit import Scalar

__all__ = [
    "DTYPES",
    "Condition",
    "MergekitConfig",
    "ModelInput",
    "Settings",
    "Slice",
    "TokenSource",
    "split_adapter",
]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Condition:
    """Value that a mergekit file gives a parameter for the tensors with `filter` in their names.

    Several `values` are interpolated over the layers of a slice, from the first layer to the last. `values` is empty if
    the file has no valid value. For messages, `place` is the key in the file, and `text` is the text of the values in
    the file.
    """

    filter: str
    values: tuple[Scalar, ...]
    place: str
    text: str

    def at(self, t: float) -> Scalar | None:
        """Value of the parameter at a layer; None if the field `values` is empty.

        `t` is the position of the layer in its slice: 0 for the first layer, 1 for the last. The values are at equal
        distances from 0 to 1. Between two numbers the result is interpolated linearly. True and false are not
        interpolated: the result is the value at `t` or, if no value is at `t`, the last value before `t`.
        """
        if not self.values:
            return None
        position = t * (len(self.values) - 1)
        index = int(position)
        if isinstance(self.values[0], bool):
            return self.values[index]
        fraction = position - index
        following = self.values[min(index + 1, len(self.values) - 1)]
        return (1 - fraction) * self.values[index] + fraction * following


Settings = Mapping[str, tuple[Condition, ...]]


@dataclass(frozen=True)
class ModelInput:
    """One of the models that a slice merges, with the range [start, stop) of its layers.

    `layers` is None for all layers of the model. `settings` are the parameters that the file sets for this model alone.
    `place` is the key in the file, for messages.
    """

    model: str
    layers: tuple[int, int] | None
    settings: Settings
    place: str


@dataclass(frozen=True)
class Slice:
    inputs: tuple[ModelInput, ...]
    base: str | None
    settings: Settings
    place: str


@dataclass(frozen=True)
class TokenSource:
    """Source of the merged model's embedding row for one token.

    The source is the row of `model` for the token itself, for another `token`, or for the token with the id `id`. If
    `model` is None, the row is zero. With `force`, all models get this row; otherwise, only models that lack the token
    get it.
    """

    model: str | None
    token: str | None = None
    id: int | None = None
    force: bool = False


@dataclass(frozen=True)
class MergekitConfig:
    """A validated mergekit configuration.

    Models are named as in the file: directories or hub ids, MODEL+LORA for an adapter to a model.

    - `method`: mergekit's name of the merge method
    - `slices`: the slices of the merge; each merges adjacent layers of one or several models
    - `base_model`: the base model, or None if the file states none
    - `settings`: the parameters for the whole file
    - `module_settings`: the parameters for the file's only module, which have precedence
    - `dtype`: the dtype of the written merge, or None if the file states none
    - `tokenizer_source`: "base", "union" or a model; None if the file states none, which means the base
    - `tokenizer_place`: the key of `tokenizer_source` in the file
    - `chat_template`: the file's setting of the chat template, or None
    - `tokens`: the tokens whose embedding rows the file chooses
    - `own_tokens`: tokens listed without a source; the file requires that every model has a row for them
    - `pad_to_multiple_of`: the vocabulary is padded to a multiple of this number, unless it is None
    - `stacks_experts`: whether the experts of a layer's mixture of experts are merged as one tensor
    """

    method: str
    slices: tuple[Slice, ...]
    base_model: str | None = None
    settings: Settings = field(default_factory=dict)
    module_settings: Settings = field(default_factory=dict)
    dtype: str | None = None
    tokenizer_source: str | None = None
    tokenizer_place: str = "tokenizer_source"
    chat_template: str | None = None
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    own_tokens: tuple[str, ...] = ()
    pad_to_multiple_of: int | None = None
    stacks_experts: bool = False

    @property
    def base(self) -> str:
        """The model with the configuration and tokenizer of the merge, which is also the base of task vectors.

        The result is the field `base_model`; if this is None, the base of the first slice; if the slice has none, its
        first model. If no model could be read, the result is "".
        """
        bases = (slice_.base for slice_ in self.slices[:1])
        inputs = (source.model for slice_ in self.slices[:1] for source in slice_.inputs)
        return next((model for model in (self.base_model, *bases, *inputs) if model), "")

    @property
    def models(self) -> tuple[str, ...]:
        """All models that the configuration names, beginning with the base."""
        return tuple(dict.fromkeys((*self._merged, *self.unmerged)))

    @property
    def _merged(self) -> tuple[str, ...]:
        inputs = (source.model for slice_ in self.slices for source in slice_.inputs)
        bases = (slice_.base for slice_ in self.slices if slice_.base is not None)
        return tuple(dict.fromkeys(filter(None, [self.base, *inputs, *bases])))

    @property
    def unmerged(self) -> Mapping[str, str]:
        """Models that are not merged but provide the tokenizer or embedding rows of tokens.

        The result maps each model to the key of the file that names it, such as "tokenizer.tokens.TOKEN.source".
        """
        places = {token.model: f"tokenizer.tokens.{name}.source" for name, token in self.tokens.items()}
        places |= {self.tokenizer_source: self.tokenizer_place}
        others = (None, "", "base", "union", *self._merged)
        return {model: place for model, place in places.items() if model is not None and model not in others}

    def conditions(self) -> Iterator[Condition]:
        """Yield all settings of parameters: of the whole file, of its module, of slices and of models."""
        inputs = (source.settings for slice_ in self.slices for source in slice_.inputs)
        of_slices = (slice_.settings for slice_ in self.slices)
        for settings in (self.settings, self.module_settings, *of_slices, *inputs):
            for conditions in settings.values():
                yield from conditions


def split_adapter(model: str) -> tuple[str, str | None]:
    """Split the name MODEL+LORA into the names of model and adapter; without "+", the adapter's name is None."""
    name, plus, adapter = model.partition("+")
    return name, adapter if plus else None
