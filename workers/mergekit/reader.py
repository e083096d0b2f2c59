"""Reader of mergekit configurations, which reports errors, and warns of settings that mergekit would ignore.

Each message states its place in the file. There is no warning about `int8_mask`, which has long had no effect and is in
many files.
"""

from __future__ import annotations

import datetime
import difflib
import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from search_spaces.errors import InvalidRecipe
from search_spaces.methods.mergekit import Parameter, Scalar
from workers.mergekit.config import (
    DTYPES,
    Condition,
    MergekitConfig,
    ModelInput,
    Settings,
    Slice,
    TokenSource,
    split_adapter,
)
from workers.mergekit.methods import MERGEKIT_METHODS, WITHOUT_EFFECT

__all__ = ["read_configuration", "shown"]

log = logging.getLogger(__name__)

TOP = (
    "merge_method",
    "base_model",
    "models",
    "slices",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "chat_template",
)

# The only module of a language model, as mergekit calls it.
MODULE = "default"

# The reason why a key has no effect, for keys that have a meaning in another program or place.
EXPLAINED = {
    "residual_weight": "mergekit accepts it and never reads it",
    "override_architecture": "the architecture is what the model's config.json says",
    "out_path": "the result's directory is given by --out",
    "experts": "mergekit-moe reads it, which builds mixtures of experts",
    "revision": "write the revision with the model's name, as NAME@REVISION",
}

# The texts that YAML 1.1 and pydantic accept for true and false.
FLAGS = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}

PARAMETER_NAMES = {parameter.name for method in MERGEKIT_METHODS.values() for parameter in method.parameters}


def read_configuration(
    document: Any, *, warn: Callable[[str], None] = log.warning, problems: list[str] | None = None
) -> MergekitConfig:
    """Read a mergekit configuration from `document`, its content as parsed from YAML.

    `warn` is called with one line, which names the place in the file, for every setting that mergekit would ignore
    without a message. Raises InvalidRecipe, with a line for every error and every unsupported setting. If `problems` is
    given, these lines are added to it instead, and the returned configuration contains the parts that could be read.
    """
    reader = _Reader()
    configuration = reader.configuration(document)
    for warning in dict.fromkeys(reader.warnings):
        warn(warning)
    found = list(dict.fromkeys(reader.problems))
    if problems is not None:
        problems += found
    elif found:
        raise InvalidRecipe("\n".join(found))
    return configuration


class _AsInYaml(reprlib.Repr):
    """Formatter of values for messages, in the notation of YAML files; long values are shortened."""

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802  # the name of the type
        return "null"

    def repr_float(self, value: float, level: int) -> str:
        if math.isfinite(value):
            return repr(value)
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"

    def repr_date(self, value: datetime.date, level: int) -> str:
        return value.isoformat()

    def repr_datetime(self, value: datetime.datetime, level: int) -> str:
        return value.isoformat(" ")


def shown(value: Any) -> str:
    """Format a value for a message as a YAML file would write it; None is written as "nothing"."""
    return "nothing" if value is None else _AsInYaml().repr(value)


class _Reader:
    """Reader of one mergekit configuration; it collects errors, and warnings of settings that have no effect."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self._method: str | None = None

    def configuration(self, document: Any) -> MergekitConfig:
        top = self._mapping(document, "", (*TOP, "modules", "tokenizer", "name", "experts"))
        self._method = self._merge_method(top.get("merge_method"))
        settings = self._settings(top.get("parameters"), "parameters")
        module_settings: Settings = {}
        if not top.get("modules"):
            slices = self._slices(top, "")
        else:
            if top.get("models") or top.get("slices"):
                self._problem("", "expected exactly one of models, slices and modules")
            slices, module_settings = self._module(top["modules"])
        source, source_place = top.get("tokenizer_source"), "tokenizer_source"
        tokenizer: Mapping[str, Any] = {}
        if top.get("tokenizer") is not None:
            if source is not None:
                self._problem("tokenizer", "tokenizer_source is given too; give one of them")
            tokenizer = self._mapping(top["tokenizer"], "tokenizer", ("source", "tokens", "pad_to_multiple_of"))
            # mergekit's default for a tokenizer without a source.
            source, source_place = tokenizer.get("source", "union"), "tokenizer.source"
        tokens = self._tokens(tokenizer.get("tokens"))
        dtypes = [self._dtype(top.get(name), name) for name in ("out_dtype", "dtype")]
        return MergekitConfig(
            method=self._method or "",
            slices=slices,
            base_model=self._optional_model(top.get("base_model"), "base_model"),
            settings=settings,
            module_settings=module_settings,
            dtype=next((dtype for dtype in dtypes if dtype), None),
            tokenizer_source=self._optional_model(source, source_place),
            tokenizer_place=source_place,
            chat_template=self._chat_template(top.get("chat_template")),
            tokens={token: found for token, found in tokens.items() if found is not None},
            own_tokens=tuple(token for token, found in tokens.items() if found is None),
            pad_to_multiple_of=self._multiple(tokenizer.get("pad_to_multiple_of")),
            stacks_experts=self._stacks_experts(top.get("experts")),
        )

    def _module(self, node: Any) -> tuple[tuple[Slice, ...], Settings]:
        """Read slices and settings under the key `modules`, which a file may have in place of `models` or `slices`.

        `node` is the value of the key. Only the single module of a language model ("default") is supported. For other
        modules, the problem is reported, and the result is empty.
        """
        if not isinstance(node, Mapping) or set(node) != {MODULE}:
            names = ", ".join(map(str, node)) if isinstance(node, Mapping) else shown(node)
            self._problem(
                "modules",
                f"{names} is not supported: models of several modules, which read images or sound or have an encoder, "
                f"are not merged; give {MODULE}, models or slices",
            )
            return (), {}
        place = f"modules.{MODULE}"
        found = self._mapping(node[MODULE], place, ("models", "slices", "parameters"))
        return self._slices(found, place), self._settings(found.get("parameters"), f"{place}.parameters")

    def _slices(self, node: Mapping[str, Any], place: str) -> tuple[Slice, ...]:
        """Read the slices of `node`, which must have either the key `models` or the key `slices`.

        The key `models` gives one slice with all layers. If both keys or neither are present, the problem is reported,
        and the result is empty. `place` is the key of `node` in the file, "" for the whole file.
        """
        given = [name for name in ("models", "slices") if name in node]
        if len(given) > 1:
            given = [name for name in given if node[name]]
        if len(given) != 1:
            self._problem(place, "expected exactly one of models and slices")
            return ()
        here = f"{place}.{given[0]}" if place else given[0]
        if given == ["models"]:
            return (Slice(self._inputs(node["models"], here, has_layers=False), None, {}, ""),)
        listed = self._list(node["slices"], here)
        slices = tuple(self._slice(entry, f"{here}.{i}") for i, entry in enumerate(listed))
        self._check_depth(slices, here)
        return slices

    def _check_depth(self, slices: Sequence[Slice], place: str) -> None:
        """Report slices without layers: an error if no slice has layers, a warning for an empty slice in the middle.

        The first and the last slice may be empty, because the embedding and the head come from their models. `place` is
        the key of the slices in the file.
        """
        ranges = [source.layers for slice_ in slices for source in slice_.inputs if source.layers]
        if ranges and all(start == stop for start, stop in ranges):
            self._problem(place, "there is no layer in any layer_range; END is not included")
            return
        for slice_ in slices[1:-1]:
            for source in slice_.inputs:
                if source.layers and source.layers[0] == source.layers[1]:
                    reason = "it has no layer, and embedding and head come from the first and the last slice"
                    self._warn(f"{source.place}.layer_range", list(source.layers), reason)

    def _merge_method(self, name: Any) -> str | None:
        if isinstance(name, str) and name in MERGEKIT_METHODS:
            return name
        accepted = ", ".join(MERGEKIT_METHODS)
        self._problem(
            "merge_method", f"{shown(name)} is not supported; {_nearest(name, MERGEKIT_METHODS)}known: {accepted}"
        )
        return None

    def _slice(self, node: Any, place: str) -> Slice:
        found = self._mapping(node, place, ("sources", "base_model", "parameters"))
        inputs = self._inputs(found.get("sources"), f"{place}.sources", has_layers=True)
        ranges = {source.layers[1] - source.layers[0] for source in inputs if source.layers}
        if len(ranges) > 1:
            self._problem(
                place, f"its sources have {' and '.join(map(str, sorted(ranges)))} layers; their numbers must agree"
            )
        base = self._optional_model(found.get("base_model"), f"{place}.base_model")
        return Slice(inputs, base, self._settings(found.get("parameters"), f"{place}.parameters"), place)

    def _inputs(self, node: Any, place: str, *, has_layers: bool) -> tuple[ModelInput, ...]:
        known = ("model", "layer_range", "parameters") if has_layers else ("model", "parameters")
        inputs: list[ModelInput] = []
        for index, entry in enumerate(self._list(node, place)):
            here = f"{place}.{index}"
            found = self._mapping(entry, here, known)
            if not isinstance(entry, Mapping):
                continue
            model = self._model(found.get("model"), f"{here}.model")
            if model and model in [source.model for source in inputs]:
                self._problem(f"{here}.model", f"{model} is listed twice; a model is merged once")
            layers = self._layer_range(found.get("layer_range"), f"{here}.layer_range") if has_layers else None
            settings = self._settings(found.get("parameters"), f"{here}.parameters", is_of_model=True)
            inputs.append(ModelInput(model, layers, settings, here))
        return tuple(inputs)

    def _layer_range(self, node: Any, place: str) -> tuple[int, int]:
        if isinstance(node, list) and len(node) == 2:
            start, stop = (_number(end) for end in node)
            if start is not None and stop is not None and 0 <= start <= stop and start % 1 == stop % 1 == 0:
                return int(start), int(stop)
        self._problem(place, f"{shown(node)} is not a range of layers; give [START, END] from 0, END not included")
        return 0, 1

    def _settings(self, node: Any, place: str, *, is_of_model: bool = False) -> Settings:
        settings: dict[str, tuple[Condition, ...]] = {}
        if self._method is None or node is None:
            return settings
        parameters = {parameter.name: parameter for parameter in MERGEKIT_METHODS[self._method].parameters}
        if not isinstance(node, Mapping):
            self._problem(place, f"{shown(node)} is not accepted; give a mapping (name: value)")
            return settings
        for name, value in node.items():
            here = f"{place}.{name}"
            parameter = parameters.get(name)
            if name in WITHOUT_EFFECT:
                continue
            if parameter is None:
                takes = ", ".join(parameters) or "none"
                reason = f"{self._method} takes no such parameter; {_nearest(name, parameters)}it takes {takes}"
                self._warn(here, value, reason)
            elif is_of_model and parameter.scope == "shared":
                self._warn(here, value, f"{self._method} has one {name} for all models; give it under parameters")
            else:
                settings[name] = self._conditions(value, here, parameter)
        return settings

    def _conditions(self, node: Any, place: str, parameter: Parameter) -> tuple[Condition, ...]:
        if isinstance(node, Mapping):
            return (self._condition(node, place, parameter),)
        if isinstance(node, list) and any(isinstance(entry, Mapping) for entry in node):
            return tuple(self._condition(entry, f"{place}.{i}", parameter) for i, entry in enumerate(node))
        return (Condition("", self._values(node, place, parameter), place, shown(node)),)

    def _condition(self, node: Any, place: str, parameter: Parameter) -> Condition:
        found = self._mapping(node, place, ("filter", "value"))
        text = found.get("filter")
        if text is not None and not isinstance(text, str):
            self._problem(f"{place}.filter", f"{shown(text)} is not accepted; give a part of a tensor's name")
            text = None
        value = found.get("value")
        values = self._values(value, f"{place}.value", parameter)
        return Condition("" if text in (None, "*") else text, values, place, shown(value))

    def _values(self, node: Any, place: str, parameter: Parameter) -> tuple[Scalar, ...]:
        entries = node if isinstance(node, list) else [node]
        places = [f"{place}.{i}" for i in range(len(entries))] if isinstance(node, list) else [place]
        values = (self._value(entry, here, parameter) for entry, here in zip(entries, places, strict=True))
        return tuple(value for value in values if value is not None)

    def _value(self, node: Any, place: str, parameter: Parameter) -> Scalar | None:
        value: Scalar | None = _flag(node) if parameter.is_flag else _number(node)
        if value is None or not math.isfinite(value):
            accepted = "true or false" if parameter.is_flag else "a number, or a list of them as a gradient over layers"
            self._problem(place, f"{shown(node)} is not accepted; give {accepted}")
            return None
        return value

    def _optional_model(self, node: Any, place: str) -> str | None:
        return None if node is None else self._model(node, place)

    def _model(self, node: Any, place: str) -> str:
        if isinstance(node, Mapping) and "path" in node:
            found = self._mapping(node, place, ("path", "revision"))
            path, revision = self._model(found["path"], f"{place}.path"), found.get("revision")
            if not isinstance(revision, str | None):
                self._problem(
                    f"{place}.revision", f"{shown(revision)} is not a branch, tag or commit; write it in quotes"
                )
                return path
            return path if revision is None else f"{path}@{revision}"
        if isinstance(node, Mapping):
            found = self._mapping(node, place, ("model", "lora"))
            model = self._model(found.get("model"), f"{place}.model")
            adapter = None if found.get("lora") is None else self._model(found["lora"], f"{place}.lora")
            return self._model(f"{model}+{adapter}", place) if model and adapter else model
        if not isinstance(node, str) or not node:
            self._problem(place, f"{shown(node)} is not a model; give a directory or the id of a hub model")
            return ""
        if not all(part is None or part for part in split_adapter(node)):
            self._problem(place, f"{node} is not a model; give MODEL+LORA, or a name without +")
        return node

    def _dtype(self, node: Any, place: str) -> str | None:
        name = node.removeprefix("torch.") if isinstance(node, str) else node
        if name == "float64":
            self.warnings.append(f"{place}: float64 is not kept: merges are computed and written in float32")
            return "float32"
        if name is None or name == "":
            return None
        if name in DTYPES:
            return str(name)
        self._problem(place, f"{shown(node)} is not supported; give {', '.join(DTYPES)}")
        return None

    def _tokens(self, node: Any) -> Mapping[str, TokenSource | None]:
        place = "tokenizer.tokens"
        if node is None:
            return {}
        if not isinstance(node, Mapping):
            self._problem(place, f"{shown(node)} is not accepted; give a mapping (token: source)")
            return {}
        return {str(token): self._token(entry, f"{place}.{token}") for token, entry in node.items()}

    def _token(self, node: Any, place: str) -> TokenSource | None:
        """Read the source of a token's embedding row; None if the file names no source for it.

        `node` is the token's entry in the file, and `place` is the key of the entry.
        """
        found = self._mapping(node, place, ("source", "force"))
        source, force = found.get("source"), _flag(found.get("force", False))
        if force is None:
            self._problem(f"{place}.force", f"{shown(found['force'])} is not accepted; give true or false")
        kind = source.get("kind") if isinstance(source, Mapping) else None
        if kind == "zero":
            return TokenSource(None, force=bool(force))
        if kind != "model_token":
            if source is None:
                if force or not isinstance(node, Mapping):
                    self._problem(f"{place}.source", "is missing; give a model, kind: zero, or kind: model_token")
                return None
            return TokenSource(self._model(source, f"{place}.source"), force=bool(force))
        inner = self._mapping(source, f"{place}.source", ("kind", "model", "token", "token_id"))
        token, number = inner.get("token"), inner.get("token_id")
        if isinstance(number, str) and number.isdecimal():
            number = int(number)
        if (
            (token is None) == (number is None)
            or not isinstance(token, str | None)
            or not isinstance(number, int | None)
        ):
            self._problem(f"{place}.source", "expected either token, a text, or token_id, a whole number")
        model = self._model(inner.get("model"), f"{place}.source.model")
        return TokenSource(model, token, number, bool(force))

    def _multiple(self, node: Any) -> int | None:
        number = _number(node)
        if node is not None and (number is None or number % 1 or number < 0):
            self._problem("tokenizer.pad_to_multiple_of", f"{shown(node)} is not accepted; give a whole number")
            return None
        return int(number) if number else None

    def _stacks_experts(self, node: Any) -> bool:
        """Whether the file asks, with the key `experts`, to merge all experts of a mixture of experts as one tensor.

        The key is this project's addition to mergekit's format, and `node` is its value. A value in the format of the
        program mergekit-moe is ignored with a warning.
        """
        if isinstance(node, list | Mapping):
            self._warn("experts", node, EXPLAINED["experts"])
        elif node not in (None, "each", "stacked"):
            self._problem("experts", f"{shown(node)} is not accepted; give each (the default) or stacked")
        return bool(node == "stacked")

    def _chat_template(self, node: Any) -> str | None:
        if node is not None and not isinstance(node, str):
            self._problem("chat_template", f"{shown(node)} is not accepted; give auto, a name, a file or a template")
            return None
        return node or None

    def _list(self, node: Any, place: str) -> list[Any]:
        if isinstance(node, list) and node:
            return node
        self._problem(place, f"{shown(node)} is not accepted; give a list with at least one entry")
        return []

    def _mapping(self, node: Any, place: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(node, Mapping):
            self._problem(place, f"{shown(node)} is not accepted; give a mapping with {', '.join(known)}")
            return {}
        for key in node:
            if key not in known and node[key] is not None and key not in WITHOUT_EFFECT:
                here = f"{place}.{key}" if place else str(key)
                reason = f"unknown key; {_nearest(key, known)}known keys: {', '.join(known)}"
                if "parameters" in known and key in PARAMETER_NAMES:
                    reason = "a parameter is read under parameters only"
                self._warn(here, node[key], EXPLAINED.get(key, reason))
        return node

    def _problem(self, place: str, message: str) -> None:
        self.problems.append(f"{place}: {message}" if place else message)

    def _warn(self, place: str, value: Any, reason: str) -> None:
        self.warnings.append(f"{place}: {shown(value)} has no effect: {reason}")


def _number(node: Any) -> float | None:
    """Convert the YAML value `node` to a number by pydantic's rules; None if it is not a number.

    Texts of numbers are accepted, because YAML reads 1e-5 as a text. True counts as 1.
    """
    if not isinstance(node, int | float | str):
        return None
    try:
        return float(node)
    except (ValueError, OverflowError):
        return None


def _flag(node: Any) -> bool | None:
    if isinstance(node, str):
        return FLAGS.get(node.lower())
    return bool(node) if node in (True, False) else None


def _nearest(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f'did you mean "{near[0]}"? ' if near else ""
