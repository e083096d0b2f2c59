"""Hugging Face checkpoints on disk: what they hold, whether a family of them can be merged, and who they are.

Everything that configurations and safetensors headers tell is checked here, before anything large is read; tensors
are mapped, one at a time, only when asked for. Pickles are never loaded and no code of a model is ever run. What to do
with the tensors is not known here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.cache import cached
from workers.errors import InvalidModel
from workers.models.adapters import ADAPTER_CONFIG, AdaptedBase, is_adapter, read_adapter, stated_base
from workers.models.components import IGNORED, Layout, is_output_head, layout, some_of
from workers.models.computed_tensors import SourceTensor
from workers.models.config import in_common_names
from workers.models.headers import TensorInfo, read_headers
from workers.models.hub import TOKENIZER_FILES, fetched, is_metadata_only, locate, named, stated_hash
from workers.models.vocabulary import BASE, EMBEDDING_NAMES, UNION, Alignment, Vocabulary, align, token_ids
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    import torch

__all__ = [
    "BY_CONFIG",
    "TOKENIZER_FILES",
    "Checkpoint",
    "aligned",
    "check_family",
    "check_tokenizer",
    "content_problems",
    "fingerprint",
    "open_checkpoint",
    "open_family",
    "open_sources",
    "stored_bytes",
]

log = logging.getLogger(__name__)

# Configuration fields, in common names, that must agree for layers of two models to be interchangeable.
STRUCTURE = (
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "partial_rotary_factor",
    "use_parallel_residual",
)

# Configuration fields that hold ids of tokens.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

BY_CONFIG = "(by config.json, or transformers' default where it is silent)"

# A report lists this many shapes of one model that differ, then counts the rest.
MAX_SHAPES = 5

# What tokenizers are likely to differ in.
PROBES = (
    "Hello world",
    " two  spaces and a tab\t.",
    "line one\nline two\n\n",
    "12+34=46",
    "caf\u00e9 \u4f60\u597d \U0001f642",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read, or an adapter to `base`, which has the tensors of its base as it changes
    them. What `read` gives is read-only; tensors that are stored are mapped and keep their dtype."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    base: Checkpoint | None = None
    _open: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The configuration in common names, defaults filled in."""
        return in_common_names(self.config)

    @cached_property
    def layout(self) -> Layout:
        return layout(self.settings, self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`. Raises InvalidModel if there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidModel((f"{self.directory}: no tensor {name!r}; it has {len(self.tensors)} others",))
        return tensor.value(self.read_stored)

    def read_stored(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as it is stored, mapped from its file."""
        from safetensors import safe_open

        if info.file not in self._open:
            if is_metadata_only(info.file.parent):
                raise InvalidModel((f"{named(str(info.file))}: its weights are on the hub, not here",))
            self._open[info.file] = safe_open(info.file, framework="pt")
        tensor: torch.Tensor = self._open[info.file].get_tensor(info.name)
        return tensor

    @cached_property
    def is_here(self) -> bool:
        """Its weights can be read, and its base's; of a hub model's stand-in they cannot."""
        return not is_metadata_only(self.directory) and (self.base is None or self.base.is_here)

    @cached_property
    def stored(self) -> frozenset[TensorInfo]:
        """What is read of files, other models' included."""
        return frozenset(info for tensor in self.tensors.values() for info in tensor.stored())

    @property
    def own(self) -> frozenset[TensorInfo]:
        """What is read of its own files."""
        return frozenset(info for info in self.stored if info.file.parent == self.directory)

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files of its own that are in use, in order of name."""
        return tuple(sorted({info.file for info in self.own}))


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read the configuration and every safetensors header of `directory`, which may be a hub id as for `hub.locate`.

    Raises InvalidModel with all problems."""
    path = locate(directory)
    problems: list[str] = []
    config = _read_config(path, problems)
    tensors = read_headers(path, problems)
    if not problems:
        problems += _checkpoint_problems(path, config, tensors)
    if problems:
        raise InvalidModel(tuple(map(named, problems)))
    return Checkpoint(path, config, {name: info for name, info in tensors.items() if not IGNORED.search(name)})


def _open_expert(directory: str | Path, base: Checkpoint | None) -> Checkpoint | None:
    """A whole model, or an adapter to `base`: None where there is no base. Raises InvalidModel with all problems."""
    path = locate(directory)
    if not is_adapter(path):
        return open_checkpoint(path)
    problems: list[str] = []
    adapted = AdaptedBase(base.directory, base.settings, base.tensors, base.layout) if base else None
    tensors = read_adapter(path, adapted, problems)
    if problems:
        raise InvalidModel(tuple(problems))
    return Checkpoint(path, base.config, tensors, base) if base else None


def check_family(
    base_dir: str | Path, experts: Mapping[str, str | Path], *, tokenizer: str = BASE
) -> tuple[Checkpoint, ...]:
    """The base's checkpoint and those of all `experts`, which can be merged with it: whole models or LoRA adapters.

    Their embeddings are as they are stored; that `aligned` can bring them to the vocabulary `tokenizer` is checked.
    Reads configurations, headers and tokenizers only, of hub models that are not here as `hub.locate` has them. Raises
    InvalidModel with every problem of every model.
    """
    problems: list[str] = []
    opened: dict[str, Checkpoint] = {}
    if not experts:
        problems.append("models.experts: there are none; name at least one model fine-tuned from the base")
    base: Checkpoint | None = None
    try:
        base = open_checkpoint(base_dir)
    except InvalidModel as error:
        problems += [f"base model: {problem}" for problem in error.problems]
    for alias, directory in experts.items():
        try:
            expert = _open_expert(directory, base)
        except InvalidModel as error:
            problems += [f"expert {alias!r}: {problem}" for problem in error.problems]
        else:
            opened |= {alias: expert} if expert else {}
    if base:
        problems += _foreign_adapters({_BASE_KEY: base, **opened}, {_BASE_KEY: base_dir, **experts})
        problems += _misfits(base, opened, tokenizer)
    if problems or base is None:
        raise InvalidModel(tuple(map(named, problems)))
    return base, *opened.values()


def _foreign_adapters(opened: Mapping[str, Checkpoint], given: Mapping[str, str | Path]) -> Iterator[str]:
    """Adapters that say they were trained on another of the models `given`: they fit the base's shapes all the same."""
    for alias, adapter in opened.items():
        if adapter.base is None:
            continue
        stated = stated_base(adapter.directory)
        bases = [
            other
            for other, model in opened.items()
            if model.base is None
            and (
                stated == str(given[other]).partition("@")[0]
                or (os.path.isdir(stated) and os.path.samefile(stated, model.directory))
            )
        ]
        if bases and _BASE_KEY not in bases:
            yield (
                f"expert {alias!r}: {adapter.directory}: an adapter to the expert {bases[0]!r} "
                f"(base_model_name_or_path is {stated}); expected adapters to the base model: merge it into "
                f"{bases[0]!r} with peft first, and give the whole model"
            )


def _misfits(base: Checkpoint, experts: Mapping[str, Checkpoint], tokenizer: str) -> Iterator[str]:
    """Why the experts cannot be merged with the base, their embeddings brought to one vocabulary."""
    views: Mapping[str, Checkpoint] = {_BASE_KEY: base, **experts}
    if tokenizer in (BASE, UNION, *experts):
        try:
            views, _ = aligned(views, tokenizer)
        except InvalidModel as error:
            yield from error.problems
    for alias in experts:
        yield from (f"expert {alias!r}: {problem}" for problem in _differences(views[_BASE_KEY], views[alias]))


# Of the base, where its alias is not known; no alias is empty.
_BASE_KEY = ""


def aligned(checkpoints: Mapping[str, Checkpoint], tokenizer: str) -> tuple[dict[str, Checkpoint], Alignment]:
    """The checkpoints (by alias, the base first) with embeddings and heads of one vocabulary, as `vocabulary.align`
    says; the base's configuration is that of a model with this vocabulary. Raises InvalidModel."""
    models = {
        alias: Vocabulary(
            checkpoint.directory,
            {name: checkpoint.tensors[name] for name in checkpoint.layout.places},
            token_ids(checkpoint.directory),
        )
        for alias, checkpoint in checkpoints.items()
    }
    alignment = align(models, tokenizer)
    views = dict(checkpoints)
    for alias, view in checkpoints.items() if alignment.tensors else ():
        config = {**view.config, "vocab_size": alignment.num_rows}
        tensors = {**models[alias].tensors, **alignment.tensors.get(alias, {})}
        views[alias] = replace(view, config=config, tensors=tensors)
    if tokenizer in checkpoints:
        base, owner = next(iter(views)), checkpoints[tokenizer].config
        special = {name: owner[name] for name in SPECIAL_TOKENS if name in owner}
        views[base] = replace(views[base], config={**views[base].config, **special})
    return views, alignment


def open_family(
    base_dir: str | Path,
    experts: Mapping[str, str | Path],
    *,
    tokenizer: str = BASE,
    base_alias: str = "base",
    cache: str | Path | None = None,
    downloads: bool = True,
    note: Callable[[str], None] = log.info,
) -> Family:
    """The checked family with absolute directories and content fingerprints. Raises InvalidModel.

    Hub models that are not here are downloaded once nothing is wrong with any model, and checked again (`note` hears
    of it as `hub.fetched` says); without `downloads` they stay stand-ins, whose fingerprints the hub's hashes tell.
    """
    checkpoints = check_family(base_dir, experts, tokenizer=tokenizer)
    if downloads and any(is_metadata_only(checkpoint.directory) for checkpoint in checkpoints):
        directories = fetched([checkpoint.directory for checkpoint in checkpoints], note=note)
        here = dict(zip(experts, directories[1:], strict=True))
        checkpoints = check_family(directories[0], here, tokenizer=tokenizer)
    base, *others = (
        ModelSource(
            alias,
            str(checkpoint.directory.resolve()),
            fingerprint(checkpoint.directory, base=checkpoints[0].directory, cache=cache),
        )
        for alias, checkpoint in zip((base_alias, *experts), checkpoints, strict=True)
    )
    return Family(base=base, experts=tuple(others), tokenizer=tokenizer)


def open_sources(family: Family) -> dict[str, Checkpoint]:
    """The checkpoints of a family by alias, the base first, checked as `check_family` does. Raises InvalidModel."""
    if not family.experts:
        return {family.base.alias: open_checkpoint(family.base.directory)}
    experts = {model.alias: model.directory for model in family.experts}
    checkpoints = check_family(family.base.directory, experts, tokenizer=family.tokenizer)
    return dict(zip((family.base.alias, *experts), checkpoints, strict=True))


def stored_bytes(checkpoints: Iterable[Checkpoint]) -> int:
    """How large all that they read of files is; what several of them read counts once."""
    return sum(info.num_bytes for info in frozenset().union(*(checkpoint.stored for checkpoint in checkpoints)))


def fingerprint(directory: str | Path, *, base: str | Path | None = None, cache: str | Path | None = None) -> str:
    """sha256 (hex) of the names and contents of what makes the model: its safetensors files, config.json,
    generation_config.json and tokenizer files; not of where it lies, nor of other files beside them. Of an adapter to
    `base`: its safetensors file, adapter_config.json, tokenizer files, and the base's fingerprint.

    Hashing a large model takes minutes, so each file's hash is remembered under `cache` (see `findings.cache_dir`) by
    path, size and modification time. Raises InvalidModel.
    """
    path = locate(directory)
    hashes: list[tuple[str, str]] = []
    if base is not None and is_adapter(path):
        weights = {info.file for info in _headers(path, "adapter_model").values()}
        others = [ADAPTER_CONFIG, *TOKENIZER_FILES]
        hashes.append(("base", fingerprint(base, cache=cache)))
    else:
        weights = set(open_checkpoint(path).files)
        others = ["config.json", "generation_config.json", *TOKENIZER_FILES]
    files = [*weights, *(path / name for name in others)]
    hashes += [(file.name, _file_hash(file, cache)) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(sorted(hashes)).encode()).hexdigest()


def _headers(path: Path, stem: str) -> Mapping[str, TensorInfo]:
    problems: list[str] = []
    tensors = read_headers(path, problems, stem=stem)
    if problems:
        raise InvalidModel(tuple(problems))
    return tensors


def content_problems(checkpoint: Checkpoint, content: str, *, cache: str | Path | None = None) -> tuple[str, ...]:
    """What only the weights tell: tensors with NaN or infinity, a tied head that is not the embedding.

    Reads all of them, once for each `content`, the model's fingerprint (`cache` as in `findings.cache_dir`). Weights
    that are not here tell nothing.
    """
    if not checkpoint.is_here:
        return ()
    key = f"content/1 {content}"
    found = cached(key, cache=cache)
    if found is None:
        found = "\n".join(_bad_tensors(checkpoint))
        cached(key, found, cache=cache)
    return tuple(f"{checkpoint.directory}: {line}" for line in found.splitlines())


def check_tokenizer(directory: str | Path) -> None:
    """Raise InvalidModel unless transformers' tokenizer of `directory` encodes and decodes as its tokenizer.json says.

    For some architectures transformers builds its own class, whatever the folder says, and a tokenizer of another
    kind silently loses characters. Folders without tokenizer.json are only loaded.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = Path(directory)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidModel((f"{path}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}",))
    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # bare ones too: the tokenizers library raises them for files it cannot read
        raise InvalidModel((f"{path}: its tokenizer cannot be loaded: {error}",)) from error
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    stated = Tokenizer.from_file(str(file))
    who, advice = f"transformers ({type(loaded).__name__})", "set model_type or the tokenizer files so that they agree"
    for probe in PROBES:
        got = loaded(probe, add_special_tokens=False)["input_ids"]
        ids = stated.encode(probe, add_special_tokens=False).ids
        if got != ids:
            raise InvalidModel(
                (f"{path}: {who} encodes {probe!r} as {got}, tokenizer.json as {ids}; expected the same ids: {advice}",)
            )
        told = loaded.decode(ids, clean_up_tokenization_spaces=False)
        text = stated.decode(ids, skip_special_tokens=False)
        if told != text:
            raise InvalidModel(
                (
                    f"{path}: {who} decodes {ids} as {told!r}, tokenizer.json as {text!r}; expected the same text: "
                    f"{advice}",
                )
            )


def _bad_tensors(checkpoint: Checkpoint) -> Iterator[str]:
    import torch

    known = checkpoint.base.tensors if checkpoint.base else {}
    for name in [name for name, tensor in checkpoint.tensors.items() if tensor is not known.get(name)]:
        tensor = checkpoint.read(name)
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            num_bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            yield f"tensor {name!r} holds {num_bad} values that are NaN or infinite; expected finite weights"
    head = checkpoint.layout.tied_head
    embeddings = [name for name in checkpoint.tensors if name.endswith(EMBEDDING_NAMES)]
    if head and embeddings and not torch.equal(checkpoint.read(head), checkpoint.read(embeddings[0])):
        yield (
            f"tensor {head!r} differs from {embeddings[0]!r}, though config.json ties them; remove it or set "
            "tie_word_embeddings to false"
        )


def _file_hash(file: Path, cache: str | Path | None) -> str:
    if stated := stated_hash(file):
        return stated
    status = file.stat()
    key = f"sha256/1 {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    known = cached(key, cache=cache)
    if known is not None and re.fullmatch("[0-9a-f]{64}", known):
        return known
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    cached(key, found, cache=cache)
    return found


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path}: no config.json; expected a Hugging Face model directory")
        return {}
    except RecursionError:
        problems.append(f"{file}: is nested too deeply")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{file}: cannot be read as JSON: {error}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{file}: holds a {type(config).__name__}; expected an object")
        return {}
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        problems.append(f"{file}: the model is quantised ({method}); merge the float32, float16 or bfloat16 original")
    if config.get("is_encoder_decoder") or config.get("vision_config") is not None:
        kind = "an encoder-decoder" if config.get("is_encoder_decoder") else "a vision-language"
        problems.append(f"{file}: {kind} model ({config.get('model_type')}); only decoder-only text models are merged")
    else:
        try:
            in_common_names(config)
        except InvalidModel as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    return config


def _checkpoint_problems(path: Path, config: Mapping[str, Any], tensors: Mapping[str, SourceTensor]) -> Iterator[str]:
    settings = in_common_names(config)
    try:
        found = layout(settings, tensors)
    except InvalidModel as error:
        yield from (f"{path}: {problem}" for problem in error.problems)
        return
    stated = settings.get("num_hidden_layers", found.num_layers)
    if stated != found.num_layers:
        yield f"{path}: num_hidden_layers is {stated} {BY_CONFIG}, its tensors are of {found.num_layers} layers"
    if found.is_tied and settings.get("tie_word_embeddings") is False:
        yield f"{path}: tie_word_embeddings is false {BY_CONFIG}, but no output head (lm_head) is stored"


def _differences(base: Checkpoint, expert: Checkpoint) -> Iterator[str]:
    """Why layers of `expert` cannot be exchanged with those of `base`."""
    where = str(expert.directory)
    stated, wanted = _structure(expert.settings), _structure(base.settings)
    for name in wanted:
        if name in stated and stated[name] != wanted[name]:
            yield f"{where}: {name} is {stated[name]!r}; the base has {wanted[name]!r}"
    if base.layout.is_tied != expert.layout.is_tied:
        names = {True: "tied to the embedding", False: "a tensor of its own"}
        yield (
            f"{where}: its output head is {names[expert.layout.is_tied]}, the base's is {names[base.layout.is_tied]}; "
            "both must be the same (tie_word_embeddings, lm_head.weight)"
        )
    base_names, names_ = _comparable(base.layout), _comparable(expert.layout)
    if missing := base_names - names_:
        yield f"{where}: lacks {len(missing)} tensors of the base: {some_of(missing)}"
    if extra := names_ - base_names:
        yield f"{where}: has {len(extra)} tensors that the base lacks: {some_of(extra)}"
    shapes = [
        f"tensor {name!r} has shape {list(theirs)}; the base has {list(ours)}"
        for name in sorted(base_names & names_)
        if (theirs := expert.tensors[name].shape) != (ours := base.tensors[name].shape)
    ]
    yield from (f"{where}: {shape}" for shape in shapes[:MAX_SHAPES])
    if len(shapes) > MAX_SHAPES:
        yield f"{where}: {len(shapes) - MAX_SHAPES} more tensors differ in shape from the base's"


def _structure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that two models must share, as far as `settings` say them, rotary embeddings included: every merge,
    an expert alone among them, computes with the base's."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    fields = {name: settings.get(name) for name in (*STRUCTURE, "rope_theta")}
    fields |= {"rope_type": rope.get("type"), **rope}
    return {name: value for name, value in fields.items() if value is not None}


def _comparable(found: Layout) -> set[str]:
    """The tensors to compare between models: all but output heads, whose difference is reported by itself."""
    return {name for name in found.places if not is_output_head(name)}
