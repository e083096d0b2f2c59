"""Sharpness-aware minimization (SAM and ASAM); the method SAFT-Merge uses it to train experts for merging.

A step computes two gradients: g at the parameters theta, then another gradient at theta plus an offset, where the loss
is higher. The second gradient updates theta. With rho as the size of the offset and eta as a small constant:

    SAM:  offset = rho g / |g|;    ASAM:  offset = rho T^2 g / |T g|, T = |theta| + eta on matrices, 1 on vectors

SAM: Foret et al., ICLR 2021, equations 2 and 3. ASAM: Kwon et al., ICML 2021, equation 7 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.training.mergopt.wrapper import OptimizerWrapper

__all__ = ["ASAM_RHO", "SAM_RHO", "SharpnessAware"]

# The papers' defaults for SAM and ASAM, and ASAM's eta.
SAM_RHO, ASAM_RHO, ASAM_ETA = 0.05, 0.5, 0.01


class SharpnessAware(OptimizerWrapper):
    """Wrapper of any optimizer for sharpness-aware minimization (SAM or ASAM).

    The method `step` takes a closure that clears the gradients, computes the loss and its gradients, and returns the
    loss. The closure is called twice: at the parameters, and at the parameters plus an offset. The first loss is
    returned. `rho` > 0 is the size of the offset; if `rho` is None, the size in the paper of SAM or ASAM is used.
    `is_adaptive` selects ASAM, which scales the offset by the magnitudes of the parameters plus `eta`. Under data
    parallelism, gradients are averaged over ranks before the offset is computed, so that all ranks have the same
    offset. If parameters are sharded, each rank has its part of the offset, computed with the gradient's norm over all
    ranks.
    """

    def __init__(
        self, optimizer: Optimizer, *, rho: float | None = None, is_adaptive: bool = False, eta: float = ASAM_ETA
    ) -> None:
        rho = (ASAM_RHO if is_adaptive else SAM_RHO) if rho is None else rho
        if not 0 < rho < float("inf"):
            raise ValueError(f"sam: rho {rho}; expected a finite number above 0")
        super().__init__(optimizer)
        self.rho, self.is_adaptive, self.eta = rho, is_adaptive, eta

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update by sharpness-aware minimisation (SAM), and return the loss.

        `closure` clears the gradients, computes the loss and its gradients, and returns the loss. The closure is called
        twice: at the parameters, and at the parameters plus an offset in whose direction the loss rises. The update
        uses the gradients of the second call; the result is the loss of the first call. Raises ValueError if `closure`
        is None.
        """
        if closure is None:
            raise ValueError("sam: step() needs a closure, which it calls at two points")
        with torch.enable_grad():
            loss = closure()
        with _Moved(self._ascent()), torch.enable_grad():
            closure()
        self.optimizer.step()
        return loss

    @torch.no_grad()
    def _ascent(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of a parameter (this rank's part of it) and an offset, in whose direction the loss rises.

        SAM computes a second gradient at the parameters plus these offsets. The result is empty if all gradients are 0,
        or if no parameter has a gradient.
        """
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moved:
            return []
        # T g and T^2 g; T is 1 for SAM
        parts = [_local(p) for p in moved]
        scales = [self._scale(part) for part in parts]
        scaled = [_local(p.grad) * scale for p, scale in zip(moved, scales, strict=True)]
        norm = torch.stack([each.float().norm() for each in scaled]).norm()
        if isinstance(moved[0], DTensor):
            square = norm.square()
            torch.distributed.all_reduce(square, group=moved[0].device_mesh.get_group())
            norm = square.sqrt()
        if norm == 0:
            return []
        factor = self.rho / norm
        return [
            (part, each * scale * factor.to(part.dtype))
            for part, each, scale in zip(parts, scaled, scales, strict=True)
        ]

    def _scale(self, parameter: torch.Tensor) -> torch.Tensor | float:
        return parameter.abs() + self.eta if self.is_adaptive and parameter.dim() > 1 else 1.0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter or gradient that this rank holds; all of it if it is not sharded.

    The result shares the memory of `tensor`.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Moved:
    """Context manager that adds offsets to parameters on entry, and restores the parameters bit for bit on exit.

    `steps` has pairs of a parameter and its offset.
    """

    def __init__(self, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._steps = steps
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        self._copies = [parameter.detach().clone() for parameter, _ in self._steps]
        for parameter, step in self._steps:
            parameter.add_(step)

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for (parameter, _), copy in zip(self._steps, self._copies, strict=True):
            parameter.copy_(copy)
