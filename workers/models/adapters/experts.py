"""LoRA adapters of stacked mixture-of-experts matrices, which peft's setting `target_parameters` names.

transformers holds the experts of a layer as one parameter for each kind of matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.models.adapters.adapted_base import AdaptedBase
from workers.models.adapters.settings import Settings
from workers.models.adapters.stored import Matrices
from workers.models.components import STACKS
from workers.models.computed_tensors import LowRankExpert, LowRankStack, SourceTensor

__all__ = ["Stack", "changed_stack", "stack_at", "stack_problems"]


@dataclass(frozen=True)
class Stack:
    """Parameter in transformers that stacks one matrix of each expert in an MoE layer.

    `parameter` is its name in transformers. `parts` has, for each expert of the mixture, the names of the stored
    tensors whose rows together are the expert's matrix. If `is_stored` is True, the parameter is stored as one tensor,
    and `parts` has only the name of this tensor.
    """

    parameter: str
    parts: tuple[tuple[str, ...], ...]
    is_stored: bool


def stack_at(module: str, base: AdaptedBase, settings: Settings) -> Stack | None:
    """Find the stacked MoE parameter that a LoRA adapter's matrices at `module` change; None if there is none.

    A stack joins one matrix of each expert of a layer's mixture of experts (such as all down projections) in one
    tensor. If an adapter changes several stacks of one mixture, their matrices have the same module name but for
    "base_layer", which peft repeats once for each stack wrapped later. Therefore the number of times that "base_layer"
    occurs in `module` identifies the stack. Only stacks that the adapter's setting `target_parameters` names are
    considered. `base` is the model that the adapter changes, and `settings` are the adapter's settings.
    """
    experts = module.replace(".base_layer", "")
    depth = module.count(".base_layer")
    trained = []
    for matrix in STACKS:
        parameter = f"{experts}.{matrix}"
        if any(parameter == each or parameter.endswith(f".{each}") for each in settings.parameters):
            name = base.stack(parameter)
            if name is not None:
                joined = base.layout.stacks.get(name)
                trained.append(Stack(parameter, joined or ((name,),), is_stored=joined is None))
    return trained[-1 - depth] if depth < len(trained) else None


def stack_problems(module: str, matrices: Matrices, stack: Stack, base: AdaptedBase, settings: Settings) -> list[str]:
    """Reasons why a LoRA adapter's matrices at `module` cannot change the parameter `stack`.

    The parameter joins one matrix of each expert of a mixture of experts. `matrices` are the adapter's matrices A and B
    for the module, `base` is the model that the adapter changes, and `settings` has the rank. Possible reasons are that
    A or B is missing, or has another shape than the rank and the stack require.
    """
    if missing := {"A", "B"} - matrices.sides.keys():
        return [f"{module}: its LoRA matrix {missing.pop()} is missing"]
    a, b = matrices.sides["A"].shape, matrices.sides["B"].shape
    num_experts, outputs, inputs = _stack_shape(stack, base)
    rank = settings.rank(stack.parameter) * num_experts
    if (a, b) != ((rank, inputs), (outputs, rank)):
        expected = f"A {[rank, inputs]} and B {[outputs, rank]} for {num_experts} experts"
        return [f"{module}: its matrices are A {list(a)} and B {list(b)}; expected {expected} of {stack.parameter}"]
    return []


def _stack_shape(stack: Stack, base: AdaptedBase) -> tuple[int, int, int]:
    """Shape of a stacked MoE parameter as (experts, outputs, inputs).

    The parameter `stack` joins one matrix of each expert of a layer's mixture of experts. The files of `base`, the
    model that the adapter changes, may store it with other axes, or as several tensors.
    """
    shapes = [base.tensors[name].shape for name in stack.parts[0]]
    if not stack.is_stored:
        return len(stack.parts), sum(shape[0] for shape in shapes), shapes[0][1]
    experts, rows, columns = shapes[0]
    return (experts, columns, rows) if base.has_transposed_stacks else (experts, rows, columns)


def changed_stack(matrices: Matrices, stack: Stack, base: AdaptedBase, settings: Settings) -> dict[str, SourceTensor]:
    """Add the product of a LoRA adapter's matrices to a stacked MoE parameter of the base.

    `matrices` are the adapter's matrices A and B, `stack` is the parameter, which stacks one matrix of each expert.
    `settings` are the adapter's settings. The result contains the changed tensors, keyed by the names under which the
    base's files store them.
    """
    a, b, scaling = matrices.sides["A"], matrices.sides["B"], settings.scaling(stack.parameter)
    if stack.is_stored:
        ((name,),) = stack.parts
        return {name: LowRankStack(base.tensors[name], a, b, scaling, base.has_transposed_stacks)}
    changed: dict[str, SourceTensor] = {}
    for number, names in enumerate(stack.parts):
        first_row = 0
        for name in names:
            weight = base.tensors[name]
            changed[name] = LowRankExpert(weight, a, b, scaling, number, len(stack.parts), first_row)
            first_row += weight.shape[0]
    return changed
