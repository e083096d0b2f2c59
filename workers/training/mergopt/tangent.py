"""Fine-tuning in the tangent space of the base model, by one Jacobian-vector product per forward pass.

Ortiz-Jimenez et al., "Task arithmetic in the tangent space", NeurIPS 2023, equation 6. The base model f with the
parameters theta_0 is replaced by its linearization in the trained parameters theta, for an input x:

    f(x; theta_0) + <grad f(x; theta_0), theta - theta_0>

The method is for small models: theta_0 is in memory beside theta, and a forward pass takes two to three times as long.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.func import functional_call, jvp

__all__ = ["LinearizedModel", "TangentModel"]


class TangentModel(torch.nn.Module):
    """Linearization of `model` at its weights at the time when this object is made.

    The trained parameters are the parameters of `model`. The result is linear in them: it replaces the model's output
    `output`, which is `logits` [rows, columns, vocabulary] for a language model. Attention must be eager, because fused
    kernels have no forward derivative.
    """

    def __init__(self, model: torch.nn.Module, *, output: str = "logits") -> None:
        super().__init__()
        self.model = model
        self._output = output
        self._origin = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    def forward(self, **inputs: Any) -> torch.Tensor:
        """The output of the linearized model, which is linear in the trained parameters.

        `inputs` are the inputs of the model, such as `input_ids` [rows, columns].
        """
        moving = dict(self.model.named_parameters())
        differences = {name: moving[name] - origin for name, origin in self._origin.items()}

        def output(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            found: torch.Tensor = getattr(functional_call(self.model, parameters, kwargs=inputs), self._output)
            return found

        outputs: Any = jvp(output, (self._origin,), (differences,))
        at_origin, slope = outputs
        total: torch.Tensor = at_origin + slope
        return total


class LinearizedModel:
    """Wrapper that gives a linearized model the interface of a transformers model for scoring.

    `tangent` is the linearized model. It is linear in the weights of its attribute `model`, and is evaluated at their
    values at the time of a call. Calls compute no gradients. A linearized model has no KV cache; instead, the argument
    `past_key_values` contains the inputs of earlier calls, and the outputs at all positions are computed again.
    """

    def __init__(self, tangent: TangentModel) -> None:
        self._tangent = tangent

    def parameters(self) -> Any:
        return self._tangent.model.parameters()

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        """Compute the outputs of the linearized model, with the arguments of a transformers model.

        `past_key_values` is the value that the previous call returned, or None. The other arguments have the same
        meaning as in transformers. The outputs are `logits` [rows, columns, vocabulary] and, if `use_cache` is True,
        `past_key_values` for the next call.
        """
        given = {"input_ids": input_ids, "position_ids": position_ids}
        read = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        for name, before in (past_key_values or {}).items():
            read[name] = torch.cat([before, read[name]], dim=1)
        mask = {} if attention_mask is None else {"attention_mask": attention_mask.clone()}
        logits = self._tangent(**read, **mask, use_cache=False)
        return SimpleNamespace(logits=logits, past_key_values=read if use_cache else None)
