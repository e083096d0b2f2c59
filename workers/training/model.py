"""A transformers model into which merges are written in place, and whose parameters have gradients.

The module maps each merged tensor to a parameter. The module does not depend on merge methods or losses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from search_spaces.recipe import Recipe
from workers.errors import InvalidModel
from workers.merging.bank import Bank
from workers.models.components import first_few
from workers.models.config import settled
from workers.models.merged_files import merged_config
from workers.training.memory import divided_layers

__all__ = ["Leaves", "ParameterPart", "TrainableModel", "place", "returning"]

# Fields of a configuration that do not depend on a merge's layers.
OF_DTYPE = ("dtype", "torch_dtype")


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """Part of a model's parameter that corresponds to one merged tensor.

    If `expert` is None, the part is the whole parameter `leaf`. Otherwise `leaf` contains one matrix of every expert of
    a mixture of experts, and the part is the rows `start` to `stop` - 1 of the matrix of the expert with the index
    `expert`.
    """

    leaf: torch.nn.Parameter
    expert: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Select this part from `whole`, a tensor of the parameter's shape, such as the parameter's gradient."""
        return whole if self.expert is None else whole[self.expert, self.start : self.stop]


Leaves = Sequence[tuple[torch.nn.Parameter, Mapping[str, ParameterPart]]]


class TrainableModel:
    """A transformers model whose parameters have gradients, and into which merges are written in place.

    `bank` has the opened weights of a family, which is a base model and its experts. The model has the family's
    architecture, in `dtype` on `device`, with one copy of its weights. The model has the layers of a merge of the
    recipe `like`, or the layers of the base if `like` is None. With `recomputes`, activations within layers are
    computed again in the backward pass. With `more_devices`, the layers are divided in their order over `device` and
    `more_devices`, so that all devices hold about equal numbers of bytes; embedding, final norm and head stay on
    `device`.

    - `memory`: maps the name of each merged tensor to the part of the model's weights into which the tensor is written
    - `leaves`: for each parameter, a pair: the parameter, and its parts that are merged tensors, keyed by the tensor's
      name. A tied output head is a separate parameter in the embedding's memory, so that the gradients of embedding and
      head are computed, and can be freed, one after the other.
    - `num_layers_on`: the number of layers on `device`, then on each of `more_devices`

    Raises InvalidModel if a merged tensor is not found among the parameters of the transformers model, and
    InvalidRecipe for an order of layers that the configuration cannot express.
    """

    def __init__(
        self,
        bank: Bank,
        dtype: torch.dtype,
        *,
        device: torch.device,
        more_devices: Sequence[torch.device] = (),
        recomputes: bool = False,
        like: Recipe | None = None,
    ) -> None:
        self._of_layers = {} if like is None else _of_layers(like, bank)
        origins = _origins(bank, like if self._of_layers else None)
        self.module = _loaded(bank, dtype, origins, self._of_layers)
        self.num_layers_on: Sequence[int] = place(self.module, (device, *more_devices))
        parts = _parts(self.module, bank, dtype, origins)
        self.memory: Mapping[str, torch.Tensor] = {name: part.of(part.leaf.detach()) for name, part in parts.items()}
        self.leaves: Leaves = _leaves(self.module, parts)
        self.device: torch.device = device
        self.module.eval()
        if recomputes:
            self.recompute()

    def recompute(self) -> None:
        """Enable activation checkpointing: from now on, recompute activations within layers in the backward pass."""
        # transformers does so in training mode only. Nothing is random in it: see `settled`.
        self.module.train()
        self.module.gradient_checkpointing_enable({"use_reentrant": False})

    def holds(self, recipe: Recipe, bank: Bank) -> bool:
        """Whether the merge of `recipe` can be written into this model.

        The merge must have as many layers as the model, of the same kinds in the same order. `bank` has the weights of
        the recipe's models.
        """
        return _of_layers(recipe, bank) == self._of_layers

    def logits(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        """Compute the logits [rows, last, vocabulary] at the last `last` positions of `tokens` [rows, columns].

        Rows may be padded at their ends. Padding does not change the logits of earlier tokens, because attention is
        causal.
        """
        output = self.module(input_ids=tokens, use_cache=False, logits_to_keep=last)
        logits: torch.Tensor = output.logits[:, -last:]  # some models do not know `logits_to_keep`
        return logits

    @property
    def vocabulary(self) -> int:
        """Number of logits of a token; 0 if the model has no decoder that computes hidden states."""
        is_whole = self._decoder is self.module
        return 0 if is_whole else int(self.module.config.get_text_config().vocab_size)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states [rows, columns, hidden size] of `tokens` [rows, columns] after the final norm."""
        outputs = self._decoder(input_ids=tokens, use_cache=False)
        self._output_type = type(outputs)
        states: torch.Tensor = outputs.last_hidden_state
        return states

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits [positions, vocabulary] of hidden states [positions, hidden size].

        The hidden states are those of the method `hidden`. The model's own code computes the logits, because models
        scale or cap them.
        """
        with returning(self._decoder, self._output_type(last_hidden_state=hidden[None])):
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self.module(input_ids=tokens, use_cache=False).logits[0]
        return logits

    @property
    def _decoder(self) -> Any:
        return getattr(self.module, "base_model", self.module)


@contextmanager
def returning(module: torch.nn.Module, outputs: Any) -> Iterator[None]:
    """Context manager in which each call of `module` computes nothing and returns `outputs`.

    It lets a model compute logits from given hidden states without computing the decoder.
    """
    own = module.__dict__.get("forward")
    module.forward = lambda *_, **__: outputs
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _of_layers(recipe: Recipe, bank: Bank) -> dict[str, Any]:
    """Fields of the configuration that a merge with other layers changes, compared with the base model.

    The result is empty if the merge has the layers of the base. `bank` has the weights of the recipe's models.
    """
    config = merged_config(recipe.canonical(), bank.base, bank.views(recipe.models), dtype="float32")
    base = bank.base.config
    return {key: value for key, value in config.items() if key not in OF_DTYPE and base.get(key) != value}


def _origins(bank: Bank, like: Recipe | None) -> dict[str, str]:
    """Map the name of each tensor of a merge to the name of the base tensor that initialises it.

    `bank` has the opened weights of the base and the experts. The merge has the layers of the recipe `like`, or the
    layers of the base if `like` is None.
    """
    layout, names = bank.layout, bank.base.tensors
    if like is None:
        return {name: name for name in names}
    numbers = [layer.attention.sources[0].layer for layer in like.canonical().layers]
    places = layout.places
    origins = {name: name for name in names if name not in places or places[name].layer is None}
    return origins | {
        layout.name(place.suffix, index): name
        for index, number in enumerate(numbers)
        for name, place in places.items()
        if place.layer == number
    }


def _loaded(bank: Bank, dtype: torch.dtype, origins: Mapping[str, str], of_layers: Mapping[str, Any]) -> Any:
    """Make a transformers model from tensors of the base model, whose weights `bank` holds.

    The parameters have the dtype `dtype`. `origins` maps the name of each of the model's tensors to the name of the
    base tensor that initialises it. `of_layers` has the fields of the model's configuration that differ from the
    base's. The model's parameters are copies, because otherwise transformers would use the bank's memory.
    """
    import transformers

    config = settled(transformers.AutoConfig.from_pretrained(bank.sources.result_dir, trust_remote_code=False))
    config.update(dict(of_layers))
    kind = getattr(transformers, config.architectures[0])
    base = bank.sources.base_alias
    model, found = kind.from_pretrained(
        None,
        config=config,
        state_dict={name: bank.get(base, of).to("cpu", dtype, copy=True) for name, of in origins.items()},
        dtype=dtype,
        attn_implementation=_attention(config),
        output_loading_info=True,
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise InvalidModel((f"gradients: the family's tensors do not fit {config.architectures[0]}: {found}",))
    return model


def place(module: Any, devices: Sequence[torch.device]) -> tuple[int, ...]:
    """Move a transformers model to devices; returns the number of layers on each device.

    The layers of `module` are divided over `devices` in their order. Everything else is on the first device, to which
    the output of the last layer is moved. Raises InvalidModel if the model has no list of its layers.
    """
    number = int(module.config.num_hidden_layers)
    if len(devices) == 1:
        module.to(devices[0])
        return (number,)
    lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == number]
    if not lists:
        raise InvalidModel(
            (f"gradients: {type(module).__name__} has no list of {number} layers to divide over {len(devices)} GPUs",)
        )
    layers = lists[0]
    of_layers = sum(parameter.nbytes for parameter in layers.parameters())
    outside = sum(parameter.nbytes for parameter in module.parameters()) - of_layers
    counts = divided_layers(of_layers // number, number, outside, len(devices))

    def move_outside(part: torch.nn.Module) -> None:
        if part is not layers:
            part._apply(lambda tensor: tensor.to(devices[0]), recurse=False)  # type: ignore[no-untyped-call]
            for child in part.children():
                move_outside(child)

    move_outside(module)
    owners = [device for device, count in zip(devices, counts, strict=True) for _ in range(count)]
    layer: Any
    for layer, device in zip(layers, owners, strict=True):
        layer.to(device)
        layer.register_forward_pre_hook(partial(_inputs_on, device), with_kwargs=True)
    layers[-1].register_forward_hook(partial(_output_on, devices[0]))
    return counts


def _inputs_on(device: torch.device, layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return moved(args, device), moved(kwargs, device)


def _output_on(device: torch.device, layer: Any, args: Any, output: Any) -> Any:
    return moved(output, device)


def moved(value: Any, device: torch.device) -> Any:
    """Copy the tensors in `value`, also within tuples, lists and dicts, to `device`; other values stay as they are.

    Gradients flow back through the copies. A tensor that is on the device is not copied.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(each, device) for each in value)
    return value


def _attention(config: Any) -> str | None:
    """Attention implementation for a model with the configuration `config`: "eager" if attention scores are capped.

    Fused attention silently ignores the cap. Otherwise the result is None, and transformers chooses the implementation.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _parts(module: Any, bank: Bank, dtype: torch.dtype, origins: Mapping[str, str]) -> dict[str, ParameterPart]:
    """Map the name of each merged tensor to the parameter, or the part of a parameter, of `module` that holds it.

    A part is found by the tensor's name or, if this fails, by its values. Therefore the model must hold the base's
    weights, in `dtype`; `bank` has the weights of the base and the experts. `origins` maps the name of each merged
    tensor to the name of the base tensor that initialises it. Raises InvalidModel if a part is not found, or if several
    parts have the tensor's values.
    """
    named = dict(module.named_parameters())
    prefix = f"{module.base_model_prefix}."
    found = {}
    for name in origins:
        known = name if name in named else prefix + name
        if known in named:
            found[name] = ParameterPart(named.pop(known))
    base = bank.sources.base_alias
    for name in origins.keys() - found.keys():
        around = [leaf for other, leaf in named.items() if _layer(other) == _layer(name)]
        device = around[0].device if around else module.device  # that of the layer
        parts = list(_with_content(bank.get(base, origins[name]).to(device=device, dtype=dtype), around))
        if len(parts) == 1:  # two tensors of equal values are not told apart
            found[name] = parts[0]
    if missing := origins.keys() - found.keys():
        raise InvalidModel(
            (
                f"gradients: {type(module).__name__} holds {first_few(missing)} in another form than the model's "
                "files; gradients by coefficients need a model without such tensors",
            )
        )
    return found


def _layer(name: str) -> str | None:
    """Index of the layer in a tensor's name, as text; None if the name has no index."""
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else None


def _with_content(tensor: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> Iterator[ParameterPart]:
    """Find the parameters, or parts of parameters, that have the values of `tensor`, a stored tensor.

    transformers may name a parameter otherwise than the stored tensor, or join the matrices of all experts of a mixture
    of experts in one parameter. Such parameters are found by comparing values. A part consists of rows of one expert's
    matrix.
    """
    for leaf in parameters:
        if leaf.shape == tensor.shape and torch.equal(leaf, tensor):
            yield ParameterPart(leaf)
        if leaf.dim() == 3 and tensor.dim() == 2 and leaf.shape[2] == tensor.shape[1]:
            rows = tensor.shape[0]
            starts = range(0, leaf.shape[1] - rows + 1, rows)
            for part in (ParameterPart(leaf, e, start, start + rows) for e in range(len(leaf)) for start in starts):
                rows_of_leaf = part.of(leaf)
                if torch.equal(rows_of_leaf[0], tensor[0]) and torch.equal(rows_of_leaf, tensor):
                    yield part


def _leaves(module: Any, parts: Mapping[str, ParameterPart]) -> Leaves:
    by_leaf: dict[torch.nn.Parameter, dict[str, ParameterPart]] = {}
    for name, part in parts.items():
        by_leaf.setdefault(part.leaf, {})[name] = part
    leaves: list[tuple[torch.nn.Parameter, Mapping[str, ParameterPart]]] = list(by_leaf.items())
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        own = torch.nn.Parameter(embedding.weight.detach())
        leaves.append((own, by_leaf[embedding.weight]))
        head.weight = own
    return leaves
