"""HeldPath: writing of merges with any order of layers (layer paths) over the weights in vLLM's worker.

The engine has a pool of layers, and a merge is a path through the pool. A layer of the pool is stored without its
scale. Therefore one copy of it serves every hop (step of a path), with any scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe, Merge, Recipe
from workers.alignments.alignment import Alignment
from workers.alignments.files import read_alignment
from workers.alignments.recipes import alignments_before, unaligned
from workers.engines.source_recipes import source_recipe
from workers.engines.vllm.checksum import checksum, word_sum
from workers.engines.vllm.held import HeldWeights, Into, Writing
from workers.engines.vllm.paths.pool import Hop, LayerPool
from workers.merging.residual_scales import BranchFactors, branch_factors

if TYPE_CHECKING:
    from workers.merging.bank import Bank
    from workers.merging.merged_tensor import MergedTensor
    from workers.merging.plan import TensorPlan

__all__ = ["HeldPath"]

LAYERS = "model.layers."


class HeldPath(HeldWeights):
    """The weights in an engine for layer paths: a pool of layers, and the order in which a merge uses them.

    A layer path is the sequence of layers of a merged model. For each layer of the merge, the path names a layer of the
    pool, factors on the layer's outputs, and optionally an alignment before the layer (a map of the residual stream).
    The parameters outside layers (embedding, final norm and output head) are held once.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(model, dtype, rank=rank, ranks=ranks)
        self._pool = LayerPool(len(model.model.layers))
        self._path: tuple[Hop, ...] = ()
        self._by_name: dict[str, torch.nn.Parameter] = {}
        self._of_layer: dict[int, list[str]] = {}  # names of parameters
        self._outside: list[str] = []
        for name, parameter in model.named_parameters():
            self._by_name[name] = parameter
            if name.startswith(LAYERS):
                self._of_layer.setdefault(int(name.split(".")[2]), []).append(name)
            else:
                self._outside.append(name)
        # Digests, computed from the sums of parameters at the time of writing.
        self._digests: dict[int, str] = {}  # of the layers of the pool
        self._outside_digest = ""
        self._outside_held: Hashable = None
        self._checked = _Checked(most=4 * self._pool.size)
        self._aligned = _Aligned(model.model.norm.weight, most=len(model.model.slots))

    @property
    def is_as_written(self) -> bool:
        return bool(self.model.model.path == self._path)

    @property
    def computed_on(self) -> Mapping[str, str]:
        layers = {hop.layer for hop in self._path}
        return {
            name: device
            for name, device in self._devices.items()
            if not name.startswith(LAYERS) or int(name.split(".")[2]) in layers
        }

    def forget(self) -> None:
        super().forget()
        self._pool.clear()
        self._digests.clear()
        self._checked.clear()
        self._aligned.clear()
        self._outside_digest, self._outside_held = "", None

    def fill(self, bank: Bank, into: Into) -> None:
        """Write layers of the source models into the engine's pool of layers, so that later swaps have less to write.

        The layers of the base are always written. Layers of experts are written only if the pool has room for them
        beside the layers of the longest merge. `bank` has the weights of the source models. `into(name, shape)` returns
        memory for computing a tensor.
        """
        spare = self._pool.size - len(self.model.model.slots)
        aliases = [model.alias for model in (*bank.family.experts, bank.family.base)]
        for alias in aliases[max(0, len(aliases) - max(1, spare // bank.layout.num_layers)) :]:
            self.hold(source_recipe(bank.family, alias, num_layers=bank.layout.num_layers), bank, into)

    def hold(self, recipe: Recipe, bank: Bank, into: Into) -> Writing:
        if not 0 < len(recipe.layers) <= (most := len(self.model.model.slots)):
            raise InvalidRecipe(f"the recipe has {len(recipe.layers)} layers; this engine holds 1 to {most}")
        before, recipe = alignments_before(recipe), unaligned(recipe)
        factors = branch_factors(recipe.layers, model_type=str(bank.base.config["model_type"]))
        between = _Between(factors, before, self._aligned.read(before, bank))
        contents = self._checked.contents(recipe.canonical())
        if contents is None or not all(map(self._pool.has, contents)):
            return self._hold_new(recipe, between, bank, into)
        self._walk(self._pool.place(contents)[0], between)
        if self._outside_held == _outside(recipe):
            bank.sources.check_unchanged()
            return Writing()
        return self._write_path(_planned(replace(recipe, layers=()), bank), bank, into, recipe)

    def _walk(self, layers: Sequence[int], between: _Between) -> None:
        self._path = tuple(Hop(*hop) for hop in zip(layers, between.factors, between.before, strict=True))
        self.model.model.path, self.model.model.alignments = self._path, between.alignments

    def _hold_new(self, recipe: Recipe, between: _Between, bank: Bank, into: Into) -> Writing:
        plan = _planned(recipe, bank)
        outside, contents, tensors = _by_layer(plan, bank)
        layers, new = self._pool.place(contents)
        written = dict(zip(layers, tensors, strict=True))
        stored = [
            replace(tensor, name=bank.layout.name(tensor.suffix, layer), layer=layer)
            for layer in sorted(new)
            for tensor in written[layer]
        ]
        self._walk(layers, between)
        done = self._write_path(replace(plan, tensors=(*outside, *stored)), bank, into, recipe)
        for layer in new:
            self._digests[layer] = self._layer_digest(layer, self._sums)
        self._checked.add(recipe.canonical(), contents)
        return done

    def _write_path(self, plan: TensorPlan, bank: Bank, into: Into, recipe: Recipe) -> Writing:
        """Compute the tensors of a merge that the engine lacks, and write them into the engine.

        `plan` lists tensors of the merge of `recipe`: the tensors outside layers (embedding, final norm and output
        head), and the tensors of the layers to write. `bank` has the weights of the source models. `into(name, shape)`
        returns memory for computing a tensor. Returns the number of written tensors, with timings. After a failure, the
        contents of all layers of the engine count as unknown.
        """
        try:
            done = self._write(plan, bank, into)
        except BaseException:
            self.forget()
            raise
        if done.tensors_written or not self._outside_digest:
            self._outside_digest = hashlib.sha256(self._lines(self._outside, self._sums, cut=0)).hexdigest()
        # Merges of single tensors may be among those outside layers.
        self._outside_held = None if recipe.tensors else _outside(recipe)
        return done

    def checksum(self) -> str:
        return _combined(self._outside_digest, self._path, self._digests, self._aligned.digests)

    def checksum_now(self) -> str:
        path = self.model.model.path
        with torch.inference_mode():
            names = [*self._outside, *(name for layer in {hop.layer for hop in path} for name in self._of_layer[layer])]
            sums = {name: word_sum(self._by_name[name]) for name in names}
        digests = {hop.layer: self._layer_digest(hop.layer, sums) for hop in path}
        aligned = {name: _digest_of(alignment) for name, alignment in self.model.model.alignments.items()}
        return _combined(hashlib.sha256(self._lines(self._outside, sums, cut=0)).hexdigest(), path, digests, aligned)

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._by_name

    def _needed(self, parameters: Iterable[str]) -> Collection[str]:
        in_path = (name for hop in self._path for name in self._of_layer[hop.layer])
        return {*self._outside, *in_path}

    def _layer_digest(self, layer: int, sums: Mapping[str, int]) -> str:
        return hashlib.sha256(self._lines(self._of_layer[layer], sums, cut=len(f"{LAYERS}{layer}."))).hexdigest()

    def _lines(self, names: Iterable[str], sums: Mapping[str, int], *, cut: int) -> bytes:
        lines = (
            f"{name[cut:]}:{self._by_name[name].dtype}:{tuple(self._by_name[name].shape)}:{sums[name]}\n"
            for name in sorted(names)
        )
        return "".join(lines).encode()


class _Checked:
    """Cache of the contents of layers in earlier recipes, so that a layer is planned only once.

    To plan a layer is to look up its tensors in the source models. The content of a layer is a hashable value that is
    equal for layers with equal weights. The method `add` stores the contents of a recipe's layers, and the method
    `contents` returns them. Layers of recipes that merge single tensors, or that use another vocabulary than the
    base's, are not stored. The cache is emptied when it has more than about `most` layers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        self._models: dict[str, str] = {}
        self._of: Hashable = None
        self._contents: dict[tuple[Merge, ...], Hashable] = {}

    def contents(self, recipe: Recipe) -> list[Hashable] | None:
        """Look up the content of each layer of `recipe`, a hashable value that is equal for layers with equal weights.

        Returns None if a layer is not in the cache, or if the recipe has other models or settings than the cached
        recipes.
        """
        if not _is_known_by_layers(recipe) or _of(recipe) != self._of:
            return None
        if not recipe.models.items() <= self._models.items():
            return None
        found = [self._contents.get(_merges(layer)) for layer in recipe.layers]
        return None if None in found else found

    def add(self, recipe: Recipe, contents: Sequence[Hashable]) -> None:
        if not _is_known_by_layers(recipe):
            return
        is_renamed = any(self._models.get(alias, content) != content for alias, content in recipe.models.items())
        if is_renamed or _of(recipe) != self._of or len(self._contents) > self._most:
            self.clear()
        self._models |= recipe.models
        self._of = _of(recipe)
        self._contents.update(zip(map(_merges, recipe.layers), contents, strict=True))


@dataclass(frozen=True)
class _Between:
    """The computations of a layer path besides its layers: factors on layers' outputs, and alignments before layers.

    A layer path names the layers of a merge in the order in which they are computed. An alignment is a map of the
    residual stream.

    - `factors`: the factors of each layer
    - `before`: for each layer, the digest of the alignment before it, or None for no alignment
    - `alignments`: the alignments, keyed by digest
    """

    factors: Sequence[BranchFactors]
    before: Sequence[str | None]
    alignments: Mapping[str, Alignment]


class _Aligned:
    """Cache of alignments: maps of the residual stream between layers that do not follow each other in one model.

    The alignments are on the device and in the dtype of the tensor `like`. At most `most` alignments are kept; `most`
    is the number of layers in the longest path. The least recently used alignments are dropped.
    """

    def __init__(self, like: torch.Tensor, *, most: int) -> None:
        self._like = like  # the device and dtype of alignments
        self._most = most
        self.clear()

    def clear(self) -> None:
        self._read: dict[str, Alignment] = {}  # least recently used first
        self.digests: dict[str, str] = {}  # of the values in memory

    def read(self, before: Sequence[str | None], bank: Bank) -> dict[str, Alignment]:
        """Return the alignments (maps of the residual stream) that the layers of a merge need, keyed by digest.

        `bank` has the path of the directory with the alignments' files. `before` has, for each layer, the digest of the
        alignment before it, or None. Alignments that are not cached are read from files. Raises InvalidRecipe if a file
        cannot be used.
        """
        found: dict[str, Alignment] = {}
        for index, digest in enumerate(before):
            if digest is None or digest in found:
                continue
            held = self._read.pop(digest, None)
            if held is None:
                stored = read_alignment(
                    bank.alignments_dir, digest, layer=index - 1, hidden_size=int(bank.base.config["hidden_size"])
                )
                held = stored.to(device=self._like.device, dtype=self._like.dtype)
                self.digests[digest] = _digest_of(held)
            found[digest] = self._read[digest] = held
        for digest in list(self._read)[: max(0, len(self._read) - self._most)]:
            del self._read[digest], self.digests[digest]
        return found


def _digest_of(alignment: Alignment) -> str:
    """Checksum of an alignment (a map of the residual stream), as a sha256 in hex.

    The checksum covers the name, type, shape and 64-bit sum of each of the alignment's tensors.
    """
    return checksum(alignment.tensors())


def _outside(recipe: Recipe) -> Hashable:
    """Key that identifies the merged tensors outside layers: embedding, final norm and output head.

    Two recipes with equal keys give equal tensors from the same source models. The rule holds only for recipes without
    merges of single tensors.
    """
    recipe = recipe.canonical()
    return _of(recipe), recipe.embedding, recipe.head


def _of(recipe: Recipe) -> Hashable:
    """The settings of a recipe that affect all merged tensors: (base model, `keeps_equal`, `trim`).

    `keeps_equal` and `trim` are settings of methods that keep only the largest elements of task vectors. `keeps_equal`
    says whether elements of equal magnitude at the threshold are all kept. `trim` says whether the largest elements are
    selected in each tensor or in the whole model.
    """
    return recipe.base, recipe.keeps_equal, recipe.trim


def _is_known_by_layers(recipe: Recipe) -> bool:
    """Whether a layer's weights follow from its entry in `recipe`, so that equal layers of other recipes can be reused.

    This is so unless the recipe merges single tensors, or uses another vocabulary than the base's. The caller compares
    settings of whole recipes, such as the base model.
    """
    return not recipe.tensors and recipe.tokenizer == "base" and not recipe.vocabulary


def _merges(layer: LayerRecipe) -> tuple[Merge, ...]:
    return layer.attention, layer.mlp, layer.norm


def _combined(outside: str, path: Iterable[Hop], digests: Mapping[int, str], aligned: Mapping[str, str]) -> str:
    """Checksum of the weights that a layer path uses: sha256 (hex) over digests, factors and alignments.

    - `outside`: the digest of the parameters outside layers, which comes first
    - `path`: the hops, that is, the layers of the pool in the order in which they are computed
    - `digests`: maps a layer's index in the pool to the layer's digest
    - `aligned`: maps the name of an alignment (a map of the residual stream) to the alignment's digest

    For each hop, the checksum covers the digest of the layer, its factors (a single number if they are equal), and the
    digest of the alignment before it. The checksum does not depend on which layers of the pool hold the path, or in
    which order they were written.
    """
    total = hashlib.sha256(f"{outside}\n".encode())
    for number, hop in enumerate(path):
        before = "" if hop.alignment is None else f":{aligned[hop.alignment]}"
        stream, mlp = hop.factors.stream, hop.factors.mlp
        factors = f"{stream!r}" if stream == mlp else f"{stream!r},{mlp!r}"
        total.update(f"{number}:{digests[hop.layer]}:{factors}{before}\n".encode())
    return total.hexdigest()


def _planned(recipe: Recipe, bank: Bank) -> TensorPlan:
    from workers.merging.plan import plan_tensors

    return plan_tensors(recipe, bank)


def _by_layer(plan: TensorPlan, bank: Bank) -> tuple[list[MergedTensor], list[Hashable], list[list[MergedTensor]]]:
    """Split the merged tensors in `plan` into the tensors of each layer and the tensors outside layers.

    `bank` has the weights of the source models. The scales of layers are removed from the tensors, because the engine
    applies them when it computes. Returns three values:

    - the tensors outside layers: embedding, final norm and output head
    - for each layer, a description of its content: a value that is equal for layers whose tensors are computed in the
      same way
    - the tensors of each layer
    """
    from workers.merging.plan import computations

    plain = [replace(tensor, factor=1.0) if tensor.factor != 1 else tensor for tensor in plan.tensors]
    found = computations(replace(plan, tensors=tuple(plain)), bank)
    outside = [tensor for tensor in plain if tensor.layer is None]
    layers: list[list[MergedTensor]] = [[] for _ in plan.recipe.layers]
    for tensor in plain:
        if tensor.layer is not None:
            layers[tensor.layer].append(tensor)
    return outside, [tuple(found[tensor.name] for tensor in tensors) for tensors in layers], layers
