"""Base class of optimizers that wrap another optimizer, and use its parameter groups and state as their own.

A learning-rate scheduler can therefore be given the wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(Optimizer):
    """Base class of optimizers that wrap another optimizer, and use its parameter groups and state.

    Subclasses define the method `step`. The wrapped `optimizer` must already have all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self._share()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add a parameter group: raise RuntimeError.

        Wrappers prepare data about all parameters once, when they are made.
        """
        if hasattr(self, "optimizer"):
            raise RuntimeError(f"{type(self).__name__}: construct it with all parameters; none can be added")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state_dict))
        self._share()

    def _share(self) -> None:
        """Let this wrapper use the parameter groups and the state of the wrapped optimizer as its own.

        The method must be called again after loading a state, because loading replaces groups and state.
        """
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
