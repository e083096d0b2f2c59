"""Distributions from which HM3's policy draws actions: points near the embeddings of steps, or allowed steps.

A policy draws an action for each step of a layer path, which is a sequence of layers of the source models. With the
action WOLPERTINGER, a policy draws a proto-action, a point in the space of the steps' embeddings, from a normal
distribution. The module `wolpertinger` chooses a step near this point. With CATEGORICAL, the policy draws one of the
allowed steps. The logit of a step is the product of the policy network's output with the step's embedding.

If layers have scales (factors on the residual stream after a layer), a proto-action has one more number: the scale of
the path's newest layer, as a number from -1 (lowest scale) to 1 (highest scale).

Axes: B paths of a batch, T steps of a path, A possible steps (the pool's layers, and the end), D numbers of a
proto-action, E dimensions of an embedding (D is E + 1 if layers have scales, otherwise E), H numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.networks import Networks
from workers.training.hm3.pool import allowed_steps, stop_of

__all__ = ["Action", "LegalSteps", "distribution", "followed", "given_places", "step_logits"]

# The logit of a step that is not allowed. An infinite one would make gradients NaN.
FORBIDDEN = -1e9


class Action(StrEnum):
    """The kind of action that a policy draws to choose the next layer of a layer path.

    A layer path is a sequence of steps, each of which is a layer of a source model.

    - CATEGORICAL: the policy draws one of the allowed steps
    - WOLPERTINGER: the policy draws a point in the space of the steps' embeddings, and a step near this point is chosen
    """

    CATEGORICAL = "categorical"
    WOLPERTINGER = "wolpertinger"


def step_logits(protos: Tensor, embeddings_AD: Tensor, allowed: Tensor) -> Tensor:
    """Logits of all possible steps of a layer path; a step that is not allowed gets a very low logit.

    A layer path is a sequence of layers of several models. A path has A possible steps, which are the layers of the
    source models and the end of the path. `protos` [..., D] are the outputs of the policy network, with D numbers each.
    `embeddings_AD` [A, D] are the embeddings of the steps. `allowed` [..., A] says which steps are allowed. The result
    is [..., A].
    """
    return (protos @ embeddings_AD.T).masked_fill(~allowed, FORBIDDEN)


def distribution(
    networks: Networks, states: Tensor, preference: Tensor, allowed: Tensor, action: Action
) -> Distribution:
    """Distribution of a policy's next action, in each of several states of layer paths.

    A layer path is a sequence of steps, each of which is a layer of a model. With `action` CATEGORICAL an action is one
    of A possible steps; with WOLPERTINGER it is a point in the space of the steps' embeddings. `networks` are the
    networks of the policy. `states` [..., H] are the encoder's states of the paths so far, with H numbers each.
    `preference` has the weights of the objectives. `allowed` [..., A] says which steps may follow. Gradients of the
    distribution do not change the embeddings, which are trained only by predicting outcomes of paths.
    """
    protos = networks.proto(states, preference)
    if action is Action.CATEGORICAL:
        logits = step_logits(protos, networks.embeddings().detach(), allowed)
        return Categorical(logits=logits, validate_args=False)
    return Independent(Normal(protos, networks.log_std.exp(), validate_args=False), 1, validate_args=False)


def followed(proto_BD: Tensor, taken_BE: Tensor, places_B: Tensor) -> Tensor:
    """Proto-actions [B, D] with which the policy would have chosen the given steps, one step in each of B episodes.

    In an episode, a policy builds a layer path (sequence of layers of a new model) step by step: it draws a
    proto-action, a point in the E-dimensional space of the steps' embeddings, and chooses a step near it. Some paths
    are given instead, and the policy learns from these proto-actions. Each is the embedding of the given step, from
    `taken_BE`.

    If layers have scales, a proto-action has one more number (D = E + 1 instead of E), which determines the scale of
    the path's last layer before this step. `places_B` has this number. Where it is NaN, because no scale was given, the
    number is copied from `proto_BD`, the policy's own proto-action.
    """
    own = proto_BD[:, taken_BE.shape[1] :]
    return torch.cat([taken_BE, torch.where(places_B[:, None].isnan(), own, places_B[:, None])], dim=1)


def given_places(paths: LayerPaths, scales: Sequence[Sequence[float]], length: int) -> Tensor:
    """Convert the layer scales of given layer paths to positions from -1 (lowest scale) to 1 (highest scale).

    A layer path is the sequence of layers of a new model, and a layer scale is a factor on the residual stream after a
    layer. `scales` has the scales of each path's layers, one for each step. The result has the shape [paths, length]. A
    policy gives the scale of a step's layer together with the next step, so column t of the result has the scale of
    step t - 1. A number is NaN where no scale is given. If `scales` is empty, the result has no rows.
    """
    found = torch.full((len(scales), length), torch.nan)
    for row, given in enumerate(scales):
        found[row, 1 : len(given) + 1] = torch.tensor([paths.place_of(scale) for scale in given])
    return found


class LegalSteps:
    """Table of the steps that may come next in an unfinished layer path, for whole batches of paths.

    A layer path is a sequence of steps, each of which is a layer of a model. The steps that may come next depend only
    on the number of steps so far and on the last layer.
    """

    def __init__(self, paths: LayerPaths) -> None:
        self._num_layers = paths.num_layers
        self._stop = stop_of(paths)
        every = [
            [allowed_steps(paths, (layer,) * count) for layer in range(paths.num_layers)]
            for count in range(paths.longest + 1)
        ]
        self._table = torch.stack([torch.stack(rows) for rows in every])

    @property
    def most(self) -> int:
        """Largest number of steps that may come next in an unfinished layer path.

        A layer path is the sequence of source layers of which a merged model consists; a step appends a layer or ends
        the path.
        """
        return int(self._table.sum(dim=2).max())

    def before(self, steps_BT: Tensor) -> Tensor:
        """Find the steps that were allowed in place of each step of several layer paths, as bool [B, T, A].

        A layer path is a sequence of layers of several models; each layer is a step of the path. `steps_BT` [B, T] are
        the T steps of each of B paths. There are A possible steps: all layers of all models, and the end of the path.
        """
        begun = torch.cat([steps_BT.new_zeros(len(steps_BT), 1), steps_BT[:, :-1]], dim=1)
        # After the end of a path there is padding, whatever it is.
        layers = torch.where(begun == self._stop, 0, begun % self._num_layers)
        return self._table[torch.arange(steps_BT.shape[1]), layers]
