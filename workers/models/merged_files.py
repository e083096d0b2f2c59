"""Files of a merged model other than weights: configuration and tokenizer, for engines and transformers.

All merges of a family have the same files, except for fields of the configuration about layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint
from workers.models.config import LAYERS_WITHOUT_EXPERTS, MERGED_TOWERS, of_each_layer
from workers.models.tokenizers import TOKENIZER_FILES, load_tokenizer
from workers.models.vocabulary import BASE, UNION, TokenAlignment, added_tokens, token_ids

__all__ = ["GENERATION_CONFIG", "WINDOWED", "make_result_dir", "merged_config"]

GENERATION_CONFIG = "generation_config.json"

# The keys of a configuration for the number of layers.
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
# The configuration field for the number of layers before the first with a sliding window.
FULL_LAYERS = "max_window_layers"
WINDOWED = "sliding_attention"

# The properties of an added token in tokenizer.json.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def make_result_dir(
    sources: Mapping[str, Checkpoint], config: Mapping[str, Any], alignment: TokenAlignment, tokenizer: str
) -> TemporaryDirectory[str]:
    """Make a temporary directory with the files that merges share: config.json, tokenizer and generation_config.json.

    `sources` are the models, keyed by alias, the base first. `config` is the content of config.json. `tokenizer`
    selects the vocabulary, and `alignment` has the tokens that are added to it. Raises InvalidModel if the files cannot
    be made.
    """
    made = TemporaryDirectory(prefix="mergesearch-result-")
    place, base = Path(made.name), next(iter(sources.values())).tokenizer_dir
    if tokenizer == UNION or alignment.added:
        owner = base if tokenizer in (BASE, UNION) else sources[tokenizer].tokenizer_dir
        _save_union(place, owner, alignment.added, sources)
    else:
        owner = base if tokenizer == BASE else sources[tokenizer].tokenizer_dir
        has_tokenizer = any((owner / name).is_file() for name in TOKENIZER_FILES)
        _copy(owner if has_tokenizer else base, place, TOKENIZER_FILES)
    _copy(owner if (owner / GENERATION_CONFIG).is_file() else base, place, (GENERATION_CONFIG,))
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return made


def merged_config(recipe: Recipe, base: Checkpoint, models: Mapping[str, Checkpoint], *, dtype: str) -> dict[str, Any]:
    """The config.json of a merged model: the base's config.json, adapted to `dtype` and to the recipe's layers.

    `dtype` is a name such as "float32". The fields for layers change if the number or order of layers differs from the
    base. Some fields, such as the kinds of attention, have an entry for each layer. In these fields, a merged layer
    gets the entry of the source layer from which its attention is merged, or, if there are several source layers, the
    entry of the first source layer. `models` are keyed by the recipe's aliases, and may have another number of layers
    than the base. Raises InvalidRecipe for an order of layers that the configuration cannot express.
    """
    config = {key: value for key, value in base.config.items() if key != "_name_or_path"}
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = dtype
    depth = base.layout.num_layers
    sources = [layer.attention.sources[0] for layer in recipe.layers]
    depths = {models[source.model].layout.num_layers for source in sources}
    if [source.layer or 0 for source in sources] == list(range(depth)) and depths == {depth}:
        return config
    if not sources:
        raise InvalidRecipe("layers: the recipe has none; expected at least one")
    if (tower := MERGED_TOWERS.get(str(config.get("model_type")))) is not None:
        return {**config, tower[0]: {**config[tower[0]], "num_hidden_layers": len(sources)}}
    listed = of_each_layer(config, depth)
    of_models = {model: _each_layer(models[model]) for model in {source.model for source in sources}}
    config |= {
        key: [of_models[source.model].get(key, values)[source.layer or 0] for source in sources]
        for key, values in listed.items()
    }
    config |= dict.fromkeys(DEPTH_KEYS & config.keys() or DEPTH_KEYS[:1], len(sources))
    if FULL_LAYERS in config:
        kinds = config.get("layer_types", ()) if config.get("use_sliding_window") else ()
        config[FULL_LAYERS] = kinds.index(WINDOWED) if WINDOWED in kinds else len(sources)
    # Some layers of a mixture of experts may be dense; some configurations list the numbers of those layers.
    kinds_of_mlp = [frozenset(base.layout.suffixes("mlp", layer)) for layer in range(depth)]
    if len(set(kinds_of_mlp)) > 1 and "mlp_layer_types" not in listed:
        if not {LAYERS_WITHOUT_EXPERTS, "decoder_sparse_step"} & config.keys():
            raise InvalidRecipe(
                "layers: the models have layers with a mixture of experts and layers without, and a configuration "
                f"of type {config['model_type']!r} cannot express another order of them"
            )
        dense = min(kinds_of_mlp, key=len)
        mlps = [layer.mlp.sources[0] for layer in recipe.layers]
        kinds_of_mlp = [frozenset(models[mlp.model].layout.suffixes("mlp", mlp.layer)) for mlp in mlps]
        numbers = [number for number, kind in enumerate(kinds_of_mlp) if kind == dense]
        config |= {LAYERS_WITHOUT_EXPERTS: numbers, "decoder_sparse_step": 1}
    return config


def _each_layer(model: Checkpoint) -> Mapping[str, Sequence[Any]]:
    return of_each_layer(model.config, model.layout.num_layers)


def _save_union(place: Path, base: Path, added: tuple[str, ...], sources: Mapping[str, Checkpoint]) -> None:
    """Save a tokenizer with additional tokens to the directory `place`.

    `base` is the directory of the tokenizer, and `added` are the additional tokens. `sources` are models, keyed by
    alias, the base first. A token may have properties in the tokenizers of these models, for example that it is a
    special token; the saved tokenizer keeps these properties. If models disagree, the choice does not depend on the
    order of the models. Raises InvalidModel if the saved tokenizer has other ids than expected.
    """
    from tokenizers import AddedToken

    described: dict[str, tuple[bool, ...]] = {}
    for source in sources.values():
        for content, token in added_tokens(source.tokenizer_dir).items():
            flags = tuple(bool(token.get(flag)) for flag in FLAGS)
            described[content] = max(flags, described.get(content, flags))
    tokenizer = load_tokenizer(base)
    plain = tuple(flag == "normalized" for flag in FLAGS)  # as add_tokens describes a text
    of_tokens = {token: dict(zip(FLAGS, described.get(token, plain), strict=True)) for token in added}
    tokenizer.add_tokens([AddedToken(token, **properties) for token, properties in of_tokens.items()])
    tokenizer.save_pretrained(place)
    before = token_ids(base) or {}
    first = 1 + max(before.values(), default=-1)
    expected = {**before, **{content: first + i for i, content in enumerate(added)}}
    if (found := token_ids(place)) != expected:
        wrong = sorted(expected.items() ^ (found or {}).items())
        raise InvalidModel(
            (f"{base}: its tokenizer cannot be given the tokens of the others: {len(wrong)} ids would differ",)
        )


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
