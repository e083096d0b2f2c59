"""The warm engine for image classifiers: one PyTorch module whose weights are replaced by one merge after another.

Merges are computed by the same bank and kernels as merges of language models, directly into the module's parameters.
The engine's features of fixed images are compared with the features by a fresh model of transformers when the engine
starts, every CANARY_EVERY swaps, and on request. An engine that fails a check refuses all further calls.

Not thread-safe: the owner of an engine holds a lock over swap and score.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.canaries import CANARY_EVERY
from workers.engines.host_memory import free_host_bytes
from workers.engines.images.classifiers import new_encoder, reference_encoder
from workers.engines.source_recipes import base_recipe
from workers.engines.vllm.checksum import combined, word_sum
from workers.errors import EngineFault, EngineUnavailable, InvalidModel, TrialFailed
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into
from workers.merging.plan import computations, plan_tensors
from workers.models.family import on_this_machine
from workers.types import CanaryReport, Family, Placement

__all__ = ["ImageEngine", "ImageSwap"]

log = logging.getLogger(__name__)

NUM_IMAGES = 4  # of a canary
CANARY_SEED = 20_240_501
GIB = 1 << 30

# Largest difference of a feature between the engine and transformers that rounding explains, as a share of the root
# mean square of the features: float32 sums in another order; 16 bits have 8 or 11 significant ones in each layer.
FEATURE_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class ImageSwap:
    """Evidence and duration of a swap, which writes a merge into the engine.

    - `weights_checksum`: the checksum of the module's parameters after the swap
    - `swap_count`: the number of merges that were written into the engine so far
    - `materialise_s`: the seconds for computing the merge and writing it into the parameters
    - `swap_s`: the seconds for all other work of the swap
    """

    weights_checksum: str
    swap_count: int
    materialise_s: float
    swap_s: float


class ImageEngine:
    """Engine for merges of image classifiers: a base model and its experts; it holds one merge at a time.

    `family` has the models. Of the engine's `options`, only `dtype`, `max_layers` and `rank_cache` are used. `device`
    is the device of the engine; the caller gives it, because GPUs are visible even to processes that have reserved
    none. Raises EngineUnavailable, with the reason, if the models cannot be opened, and EngineFault if the engine's
    features differ from transformers' features.
    """

    def __init__(
        self, family: Family, options: EngineOptions, *, device: torch.device | str, name: str = "engine"
    ) -> None:
        started = time.perf_counter()
        self.name = name
        self.device = torch.device(device)
        self.dtype = options.dtype
        if self.dtype == "auto":
            self.dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        self.num_passed = 0
        self.num_skipped = 0
        self.swap_count = 0
        self.swap_s: list[float] = []
        self._skipped = ""
        self._passed_at = 0
        self._is_checked = True
        self._fault: EngineFault | None = None
        self._held: Recipe | None = None
        self._checksum = ""
        self._computations: dict[str, Hashable] = {}
        self._sums: dict[str, int] = {}
        self._used: tuple[str, ...] = ()  # parameters of the layers that the held merge has
        try:
            self.family = on_this_machine(family)
            placement = Placement.MAPPED if self.device.type == "cpu" else Placement.HOST
            self.bank = Bank(self.family, placement, device=self.device)
            if options.rank_cache:
                self.bank.keep_ranks()
        except InvalidModel as error:
            raise EngineUnavailable(f"no engine for {family.base.directory}: {error}") from error
        self.sources = self.bank.sources
        self.base_recipe = base_recipe(self.family)
        num_layers = len(self.base_recipe.layers)
        self.encoder = new_encoder(
            self.bank.base.config,
            layers=max(options.max_layers, num_layers),
            dtype=getattr(torch, self.dtype),
            device=self.device,
        )
        settings = self.bank.base.settings
        size, channels = int(settings["image_size"]), int(settings.get("num_channels", 3))
        generator = torch.Generator().manual_seed(CANARY_SEED)
        self._images = torch.randn(NUM_IMAGES, channels, size, size, generator=generator)
        self.start_s = time.perf_counter() - started
        self.swap(self.base_recipe)
        self.check()
        log.info("image engine for %s started in %.1f s", family.base.directory, self.start_s)

    @property
    def held_digest(self) -> str | None:
        """Digest of the recipe whose merge the engine holds; None after a failed swap or check."""
        return None if self._fault is not None or self._held is None else self._held.digest

    @property
    def report(self) -> CanaryReport:
        return CanaryReport(self.name, self.num_passed, self._skipped)

    @property
    def description(self) -> str:
        """Text for users with the size of the source weights, and the memory that they are in."""
        where = "in mapped files" if self.bank.placement is Placement.MAPPED else "in host memory"
        return f"{self.bank.num_bytes / 1e9:.2f} GB of sources {where}"

    def fault(self, reason: str) -> EngineFault:
        """Declare the engine faulty, so that it refuses all further calls; return the EngineFault to raise."""
        self._fault = EngineFault(f"engine {self.name}: {reason}", self.name, self.num_passed)
        log.error("%s; this engine is not used again", self._fault)
        return self._fault

    def swap(self, recipe: Recipe) -> ImageSwap:
        """Write the merge of `recipe` over the engine's weights, unless the engine holds this merge already.

        Raises TrialFailed if the merge cannot be computed, EvidenceMismatch if files of the sources have changed, and
        EngineFault if a comparison with transformers is due and fails.
        """
        self._refuse_after_a_fault()
        if self.held_digest == recipe.digest:
            self._is_checked = False
            return ImageSwap(self._checksum, self.swap_count, 0.0, 0.0)
        started = time.perf_counter()
        try:
            merging_s = self._write(recipe)
        except InvalidRecipe as error:
            raise TrialFailed(f"the merge cannot be computed: {error}") from error
        swap_s = time.perf_counter() - started - merging_s
        self.swap_s.append(merging_s + swap_s)
        self._is_checked = False
        if self.swap_count - self._passed_at >= CANARY_EVERY:
            self._compare()
            self._is_checked = False
        return ImageSwap(self._checksum, self.swap_count, merging_s, swap_s)

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute the features [num_images, hidden_size] of preprocessed images with the merge that the engine holds.

        `pixels` is [num_images, channels, height, width]. The features are in float32 on the engine's device.
        """
        self._refuse_after_a_fault()
        return self.encoder.features(pixels)

    def check(self) -> CanaryReport:
        """Compare the engine's features of fixed images with the features that transformers computes for the merge.

        The comparison is skipped if the engine has scored nothing since the last comparison, or if there is too little
        memory for a second model. If the features of the merge are not finite, the base model is written into the
        engine and compared. Raises EngineFault if the features differ by more than rounding explains, or if the
        parameters have changed since the merge was written.
        """
        self._refuse_after_a_fault()
        if self._is_checked and self.num_passed:
            return self.report
        if self._held is None:  # the last merge could not be computed
            self._write(self.base_recipe)
        if not self._compare():
            self._write(self.base_recipe)
            self._compare()
        return self.report

    def _compare(self) -> bool:
        """Compare the held merge with transformers; return False if its features are not finite there.

        Raises EngineFault in the same cases as the method `check`.
        """
        assert self._held is not None
        needed = 8 * sum(parameter.numel() for parameter in self.encoder.parameters.values())
        if needed > (free := free_host_bytes()):
            self.num_skipped += 1
            self._skipped = f"comparing with transformers takes {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
            return True
        if self.compute_checksum() != self._checksum:
            raise self.fault("its parameters have changed since the merge was written")
        ours = self.encoder.features(self._images).cpu()
        theirs = reference_encoder(self._held, self.bank.on("cpu"), dtype=self.dtype).features(self._images)
        if not bool(torch.isfinite(theirs).all()):
            self.num_skipped += 1
            self._skipped = f"recipe {self._held.digest[:12]}: its features are not finite numbers in transformers"
            return False
        scale = float(theirs.square().mean().sqrt()) or 1.0
        difference = float((ours - theirs).abs().max()) / scale
        most = FEATURE_TOLERANCE[self.dtype]
        if not difference <= most:
            raise self.fault(
                f"recipe {self._held.digest[:12]}: features of the engine and of transformers differ by "
                f"{difference:.3g} of their size; at most {most:g} is rounding in {self.dtype}"
            )
        self.num_passed += 1
        self._passed_at, self._skipped, self._is_checked = self.swap_count, "", True
        return True

    def compute_checksum(self) -> str:
        """Compute the checksum of the current parameters of the held merge; unused layers are left out."""
        used = self._parameters(self._used)
        return combined(used, {name: word_sum(parameter) for name, parameter in used.items()})

    @contextmanager
    def whole(self, recipe: Recipe) -> Iterator[None]:
        """Context manager for scoring, which checks that the engine holds `recipe` before and afterwards.

        Raises EngineFault at its end if the engine held another recipe at one of these times.
        """
        before = self.held_digest
        yield
        if not before == self.held_digest == recipe.digest:
            raise self.fault(
                f"asked for recipe {recipe.digest}; the engine held {before} before scoring and {self.held_digest} "
                "after it"
            )

    def _write(self, recipe: Recipe) -> float:
        """Compute a merge, write it into the parameters, and return the seconds for computing it."""
        plan = plan_tensors(recipe, self.bank)
        if len(recipe.layers) > self.encoder.max_layers:
            raise TrialFailed(f"the merge has {len(recipe.layers)} layers; the engine has {self.encoder.max_layers}")
        wanted = computations(plan, self.bank)
        known = self._computations
        changed = [name for name, how in wanted.items() if known.get(name) != how]
        self._held = None
        self._computations = {name: how for name, how in known.items() if name not in changed}
        merging = time.perf_counter()
        with torch.no_grad():
            if changed:
                merge_into(plan, self.bank, {name: self.encoder.parameters[name].data for name in changed})
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - merging
            self.encoder.use_layers(len(recipe.layers))
            self._sums |= {name: word_sum(self.encoder.parameters[name]) for name in changed}
        self._computations |= wanted
        self._used = tuple(wanted)
        self._checksum = combined(self._parameters(self._used), {name: self._sums[name] for name in wanted})
        self.swap_count += 1
        self._held = recipe
        return seconds

    def _parameters(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: self.encoder.parameters[name] for name in names}

    def _refuse_after_a_fault(self) -> None:
        if self._fault is not None:
            raise EngineFault(*self._fault.args)
