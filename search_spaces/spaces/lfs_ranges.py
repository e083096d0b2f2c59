"""The merge methods that LFS searches beyond those it was published with, with their ranges and where these come from.

Weights are searched as one number per expert that takes part, and where a method divides by their sum they are stored
so divided. Random masks have one seed: two candidates differ by their numbers, not by luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from search_spaces.methods import METHODS as SPECS
from search_spaces.parameters import Configuration, Float, Parameter
from search_spaces.recipe import COEFFICIENT_DECIMALS, Merge, Source
from search_spaces.spaces.lfs_methods import PUBLISHED, ComponentGroup, Operands, SearchedMethod, on_simplex

__all__ = ["METHODS", "SEED", "Range", "RangedMethod"]

SEED = 0


@dataclass(frozen=True)
class Range:
    """A searched coefficient, in [low, high]. `per_expert`: one number for each; `on_simplex`: stored with sum one.

    Where no selection of experts was made (see `lfs`) numbers per expert do not exist: all are `default`."""

    name: str
    low: float
    high: float
    per_expert: bool = False
    on_simplex: bool = False
    default: float = 1.0


@dataclass(frozen=True)
class RangedMethod:
    """A method whose coefficients are searched in `ranges`; those in `constants` are given, others have defaults."""

    name: str
    ranges: tuple[Range, ...] = ()
    takes: Operands = "experts"
    constants: Mapping[str, float] = field(default_factory=dict)

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return tuple(
            Float(key, range_.low, range_.high, conditions=conditions)
            for range_ in self.ranges
            for key, conditions in (
                [
                    (self._key(cell, range_, expert), cell.conditions + cell.is_selected[expert])
                    for expert in cell.experts
                ]
                if range_.per_expert
                else [(self._key(cell, range_), cell.conditions)]
            )
        )

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        spec = SPECS[self.name]
        sources = tuple(Source(model) for model in operands)
        if len(operands) < spec.min_sources:
            return Merge("passthrough", sources)
        coefficients: dict[str, float | tuple[float, ...]] = dict(self._constants(len(operands)))
        for range_ in self.ranges:
            if not range_.per_expert:
                coefficients[range_.name] = configuration[self._key(cell, range_)]
                continue
            numbers = tuple(configuration.get(self._key(cell, range_, model), range_.default) for model in operands)
            coefficients[range_.name] = on_simplex(numbers) if range_.on_simplex else numbers
        return Merge(self.name, sources, coefficients, SEED if spec.takes_seed else None)

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        models = tuple(source.model for source in merge.sources)
        if merge.method == "passthrough" and self.name != "passthrough":
            return self._encode_model(cell, operands, models[0])
        if merge.method != self.name or not self._fits(operands, models):
            return None
        if any(merge.number(name) != value for name, value in self._constants(len(operands)).items()):
            return None
        values: dict[str, Any] = {}
        for range_ in self.ranges:
            if range_.per_expert:
                own = dict(zip(models, merge.per_source(range_.name), strict=True))
                values |= {self._key(cell, range_, model): own.get(model, 0.0) for model in operands}
            elif isinstance(merge.coefficients.get(range_.name), tuple):
                return None
            else:
                values[self._key(cell, range_)] = merge.number(range_.name)
        return values

    def _encode_model(self, cell: ComponentGroup, operands: tuple[str, ...], model: str) -> dict[str, Any] | None:
        """Values that decode to one of the models: the base by the coefficient that leaves it, an expert alone."""
        spec = SPECS[self.name]
        leaves_base = (spec.base_at_zero, None if spec.is_itself_alone else spec.drops_zeros)
        zero = next((r for r in self.ranges if r.name in leaves_base and r.low <= 0 and not r.on_simplex), None)
        is_alone = operands == (model,) and (spec.is_itself_alone or len(operands) < spec.min_sources)
        is_end = self.name == "nearswap" and operands[0] == model
        if not (is_alone or is_end or (zero is not None and model == cell.base)):
            return None
        return {
            self._key(cell, range_, owner): 0.0 if range_ is zero or is_end else range_.high
            for range_ in self.ranges
            for owner in (operands if range_.per_expert else (None,))
        }

    def _fits(self, operands: tuple[str, ...], models: tuple[str, ...]) -> bool:
        if self.takes == "ordered pair":
            return models == operands
        drops = SPECS[self.name].drops_zeros
        may_lack = any(range_.name == drops and range_.per_expert for range_ in self.ranges)
        return set(models) == set(operands) or (may_lack and set(models) < set(operands))

    def _constants(self, num_operands: int) -> dict[str, float]:
        # As many models as there are can agree.
        return {
            name: min(value, num_operands) if name == "agreement" else value for name, value in self.constants.items()
        }

    def _key(self, cell: ComponentGroup, range_: Range, model: str | None = None) -> str:
        key = f"{cell.name}.{self.name}.{range_.name}"
        return key if model is None else f"{key}.{model}"


@dataclass(frozen=True)
class Interpolation:
    """A method of a pair that is searched as SLERP is, by its t in [0, 1]: weights 1 - t and t."""

    name: str
    takes: Operands = "pair"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return (Float(self._key(cell), 0.0, 1.0, conditions=cell.conditions),)

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        t = round(configuration[self._key(cell)], COEFFICIENT_DECIMALS)
        return Merge(self.name, tuple(Source(model) for model in operands), {"weight": (1 - t, t)})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        models = tuple(source.model for source in merge.sources)
        if merge.method == "passthrough":
            return {self._key(cell): float(operands.index(models[0]))} if models[0] in operands else None
        if merge.method != self.name or set(models) != set(operands):
            return None
        return {self._key(cell): dict(zip(models, merge.per_source("weight"), strict=True))[operands[1]]}

    def _key(self, cell: ComponentGroup) -> str:
        return f"{cell.name}.{self.name}.t"


# Appendix A.6 of "Fine, I'll Merge It Myself", for the methods it has and for their kin.
LAMBDA = Range("lambda", 0.0, 1.0)
K = Range("k", 0.1, 0.99)
DENSITY = Range("density", 0.1, 0.99)
WEIGHTS = Range("weight", 0.0, 1.0, per_expert=True)
SHARES = Range("weight", 0.0, 1.0, per_expert=True, on_simplex=True, default=0.0)
# Drop rates 0.1 to 0.9, as DARE (arXiv:2311.03099) sweeps them.
RANDOM_DENSITY = Range("density", 0.1, 0.9)
# Scaling factor 0.5 to 2: M3, section 4.1; retained share 0.5 to 0.9: its Table 3.
MAGNITUDE = Range("lambda", 0.5, 2.0)
M3_K = Range("k", 0.5, 0.9)
# DELLA (arXiv:2406.11617) sweeps drop rates with an epsilon that leaves every probability in [0, 1].
DELLA = (Range("density", 0.2, 0.8), Range("epsilon", 0.0, 0.2))
# Model Breadcrumbs (arXiv:2312.06795): percentiles 85 and 99.3, density 0.143 and gamma 0.007, and what is around.
BREADCRUMBS = (Range("density", 0.1, 0.9), Range("gamma", 0.0, 0.05))
# TALL masks (arXiv:2405.07813): mask lambdas 0.2 to 0.6, agreement of two models.
MASK_LAMBDA = Range("mask_lambda", 0.2, 0.6)
TWO_AGREE = {"agreement": 2.0}
# PCB-Merging (arXiv:2410.02396): its code's ratios are 0.05 and 0.1, its scale 0.8 to 1.3.
PCB = (Range("lambda", 0.0, 2.0), Range("density", 0.05, 0.3))

BEYOND: tuple[SearchedMethod, ...] = (
    # Scale as depth search scales a layer's output (DIS): 0.5 to 1.5.
    RangedMethod("passthrough", (Range("scale", 0.5, 1.5),), takes="model"),
    Interpolation("nuslerp"),
    Interpolation("nuslerp_rows"),
    Interpolation("nuslerp_columns"),
    Interpolation("nuslerp_task_vectors"),
    RangedMethod("multislerp", (SHARES,)),
    RangedMethod("multislerp_task_vectors", (SHARES,)),
    RangedMethod("karcher"),  # equal weights, as published
    RangedMethod("model_stock"),
    RangedMethod("model_stock_rows"),
    # QuartetAnemoi-70B, which introduced it, has t = 0.0001: from nothing to ten times that.
    RangedMethod("nearswap", (Range("t", 0.0, 0.001),), takes="ordered pair"),
    RangedMethod("arcee_fusion", takes="ordered pair"),
    RangedMethod("ties_majority", (LAMBDA, K)),
    RangedMethod("ties_sum", (LAMBDA, K)),
    RangedMethod("ties_weighted", (WEIGHTS, DENSITY)),
    RangedMethod("ties_peft", (WEIGHTS, DENSITY)),
    RangedMethod("m3_ties", (SHARES, MAGNITUDE, M3_K)),
    RangedMethod("dare_linear", (LAMBDA, RANDOM_DENSITY)),
    RangedMethod("dare_linear_l1", (LAMBDA, RANDOM_DENSITY)),
    RangedMethod("dare_ties", (LAMBDA, RANDOM_DENSITY)),
    RangedMethod("dare_ties_l1", (WEIGHTS, RANDOM_DENSITY)),
    RangedMethod("m3_dare", (SHARES, MAGNITUDE, RANDOM_DENSITY)),
    RangedMethod("della", (LAMBDA, *DELLA)),
    RangedMethod("della_l1", (WEIGHTS, *DELLA)),
    RangedMethod("della_linear", (LAMBDA, *DELLA)),
    RangedMethod("della_linear_l1", (LAMBDA, *DELLA)),
    RangedMethod("breadcrumbs", (LAMBDA, *BREADCRUMBS)),
    RangedMethod("breadcrumbs_ties", (WEIGHTS, *BREADCRUMBS)),
    # FuseChat (arXiv:2408.07990), which introduced it, selects a tenth.
    RangedMethod("sce", (Range("select_topk", 0.1, 1.0),)),
    RangedMethod("sce_mergekit", (Range("select_topk", 0.1, 1.0),)),
    RangedMethod("ram"),  # its threshold is a constant of the paper
    # arXiv:2601.13572 has r 0.1 and alpha 0.2: from nothing to five times these.
    RangedMethod("ramplus_tl", (Range("r", 0.0, 0.5), Range("alpha", 0.0, 1.0))),
    RangedMethod("pcb", PCB),
    RangedMethod("pcb_tanh", PCB),
    RangedMethod("consensus_ta", (LAMBDA, MASK_LAMBDA), constants=TWO_AGREE),
    RangedMethod("consensus_ties", (LAMBDA, K, MASK_LAMBDA), constants=TWO_AGREE),
    RangedMethod("wudi", (LAMBDA,)),  # steps and learning rate are the paper's (arXiv:2503.08099)
)

# In the order in which they are searched and tried when a recipe is read back.
METHODS: dict[str, SearchedMethod] = {**PUBLISHED, **{method.name: method for method in BEYOND}}
