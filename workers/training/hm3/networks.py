"""Networks of HM3's policies, which map a partial layer path to a state, a proto-action and expected outcomes.

Sizes in shapes: B episodes, T steps, A possible steps (the pool's layers and the end), D dimensions of an embedding, H
numbers of a state, K objectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from search_spaces.spaces.layer_paths import LayerPaths

__all__ = ["NetworkOptions", "Networks"]

# Outcomes that differ by less count as equal.
SMALLEST_SPREAD = 1e-3


@dataclass(frozen=True)
class NetworkOptions:
    """Sizes and inputs of a policy's networks: the encoder of layer paths, the policy network and the value network.

    - `num_statistics`: the number of statistics that describe each layer
    - `first_std`: the initial standard deviation of the points, among the embeddings of layers, that the policy draws
    - `by_index`: whether each model has a learned embedding, in addition to the statistics of its layers; without it,
      the networks can be used for other models with the same number of layers
    - `sees_preference`: whether the preference vector (weights of the objectives) is an input of the policy network and
      the value network
    - `scales`: whether layers have scales, so that the policy network has one more output: the scale of the path's
      newest layer, as a number from -1 (lowest scale) to 1 (highest scale)
    """

    num_objectives: int = 1
    num_statistics: int = 0
    embedding_size: int = 16
    hidden_size: int = 64
    first_std: float = 0.5
    by_index: bool = True
    sees_preference: bool = False
    scales: bool = False


class Networks(nn.Module):
    """The three networks of HM3: the encoder of layer paths, the policy network and the value network.

    A layer path is a sequence of layers of several models. `paths` has the models through which paths lead, and
    `options` has the sizes of the networks. `descriptors` [num_models, num_layers, num_statistics] are standardised
    statistics of the layers' weights (function `layer_descriptors`). If it is None, the statistics are 0.
    """

    def __init__(self, paths: LayerPaths, options: NetworkOptions, descriptors: Tensor | None = None) -> None:
        super().__init__()
        self.paths = paths
        self.options = options
        size, hidden = options.embedding_size, options.hidden_size
        if descriptors is None:
            descriptors = torch.zeros(len(paths.models), paths.num_layers, options.num_statistics)
        if descriptors.shape != (len(paths.models), paths.num_layers, options.num_statistics):
            raise ValueError(
                f"descriptors of shape {tuple(descriptors.shape)}; the pool and options need "
                f"{(len(paths.models), paths.num_layers, options.num_statistics)}"
            )
        # Part of the pool, not of the learned state.
        self.register_buffer("descriptors", descriptors.to(torch.float32), persistent=False)
        if options.by_index:
            self.models = nn.Embedding(len(paths.models), size)
        self.layers = nn.Embedding(paths.num_layers, size)
        self.statistics = nn.Linear(options.num_statistics, size, bias=False) if options.num_statistics else None
        self.stop = nn.Parameter(torch.randn(size))
        self.start = nn.Parameter(torch.randn(size))
        self.gru = nn.GRU(size, hidden, batch_first=True)
        seen = hidden + (options.num_objectives if options.sees_preference else 0)
        # At first, layers are as they are.
        places = [paths.place_of(1.0)] if options.scales else []
        num_drawn = size + len(places)
        self.policy = _head(seen, hidden, means=[0.0] * size + places)
        self.value = _head(seen, hidden, means=[0.0] * options.num_objectives)
        self.centre: Tensor
        self.spread: Tensor
        self.register_buffer("centre", torch.zeros(options.num_objectives))
        self.register_buffer("spread", torch.ones(options.num_objectives))
        self.log_std = nn.Parameter(torch.full((num_drawn,), float(options.first_std)).log())

    @torch.no_grad()
    def measure(self, outcomes_BK: Tensor) -> None:
        """Set the mean and the standard deviation to which the value network's outputs are scaled.

        They are computed, for each objective, from `outcomes_BK` [episodes, objectives], the first known outcomes. An
        outcome is the score of an episode's layer path (sequence of layers) in an objective; the value network predicts
        it.
        """
        self.centre.copy_(outcomes_BK.mean(dim=0))
        self.spread.copy_(outcomes_BK.std(dim=0, unbiased=False).clamp(min=SMALLEST_SPREAD))

    def embeddings(self) -> Tensor:
        """Unit-length embeddings of all possible steps of a layer path: [steps + 1, dimensions].

        A layer path is a sequence of steps, each of which is a layer of a model. The last embedding belongs to the
        path's end, and each other embedding belongs to a layer.
        """
        paths = self.paths
        found = self.layers.weight[None].expand(len(paths.models), -1, -1)
        if self.options.by_index:
            found = found + self.models.weight[:, None]
        if self.statistics is not None:
            found = found + self.statistics(self.descriptors)
        every = torch.cat([found.reshape(paths.num_steps, -1), self.stop[None]])
        return nn.functional.normalize(every, dim=1)

    def states(self, steps_BT: Tensor) -> Tensor:
        """States of the encoder before the first step of several layer paths and after each step: [paths, T + 1, H].

        A layer path is a sequence of steps, each of which is a layer of a model. `steps_BT` [paths, T] are the T steps
        of each path; a state has H numbers.
        """
        table = self.embeddings()
        begun = nn.functional.normalize(self.start, dim=0).expand(len(steps_BT), 1, -1)
        states: Tensor = self.gru(torch.cat([begun, table[steps_BT]], dim=1))[0]
        return states

    def proto(self, states: Tensor, preference_K: Tensor) -> Tensor:
        """Mean of the proto-actions that the policy draws in each of several states: [..., D].

        A proto-action is a point in the space of the steps' embeddings; the next step of a layer path is chosen near
        this point. If layers have scales, a proto-action has one more number, from which the scale of the path's newest
        layer follows. (In equation 16 of the HM3 paper, a separate network computes the scale.) `states` [..., H] are
        outputs of the encoder, and `preference_K` has the weight of each objective.
        """
        found: Tensor = self.policy(self._seen(states, preference_K))
        return found

    def outcomes(self, states: Tensor, preference_K: Tensor) -> Tensor:
        """Predict, for each objective, the outcome of the complete layer path from the path so far.

        The result is [..., objectives]. A layer path is the sequence of layers of a new model, and an outcome is the
        score of the finished path in an objective, minus a price for the path's length. `states` [..., H] are the
        encoder's states of the paths so far, with H numbers each. `preference_K` has the weight of each objective; the
        network gets the weights as an input if the options say so.
        """
        found: Tensor = self.centre + self.spread * self.value(self._seen(states, preference_K))
        return found

    def _seen(self, states: Tensor, preference: Tensor) -> Tensor:
        if not self.options.sees_preference:
            return states
        return torch.cat([states, preference.expand(*states.shape[:-1], -1)], dim=-1)


def _head(num_inputs: int, hidden: int, *, means: Sequence[float]) -> nn.Sequential:
    """Make a network of two linear layers with a tanh between them, whose outputs are near `means` before training.

    `num_inputs` is the number of inputs, and `hidden` is the number of outputs of the first layer.
    """
    last = nn.Linear(hidden, len(means))
    nn.init.normal_(last.weight, std=0.01)
    with torch.no_grad():
        last.bias.copy_(torch.tensor(means))
    return nn.Sequential(nn.Linear(num_inputs, hidden), nn.Tanh(), last)
