"""Losses of target texts by teacher forcing, with one forward pass for each minibatch of targets of similar length.

The logits of a minibatch can take more memory than everything else: each of its tokens has one for each token of the
vocabulary. If there are many, they are computed for scored tokens only, and in chunks. The backward pass computes the
logits of a chunk again, as in activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch.utils.checkpoint import checkpoint

from workers.evaluation.references import Reading, Target
from workers.training.memory import LOGITS

__all__ = ["ModelInParts", "ModelOfLogits", "minibatches", "sample_losses"]

IMPOSSIBLE = float("-inf")


class ModelOfLogits(Protocol):
    """Interface of a model that returns logits, from which losses are computed, such as the class `TrainableModel`."""

    @property
    def device(self) -> torch.device: ...

    def logits(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        """Compute the logits [rows, last, vocabulary] at the last `last` positions of `tokens` [rows, columns]."""
        ...


@runtime_checkable
class ModelInParts(ModelOfLogits, Protocol):
    """Interface of a model that also computes its hidden states, and logits from them, such as `TrainableModel`."""

    @property
    def vocabulary(self) -> int:
        """Number of logits of a token; 0 if the logits cannot be computed from hidden states."""
        ...

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states [rows, columns, hidden size] of `tokens` [rows, columns] after the final norm."""
        ...

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits [positions, vocabulary] of hidden states [positions, hidden size]."""
        ...


def minibatches(targets: Sequence[Target], max_tokens: int) -> Iterator[list[int]]:
    """Divide targets into minibatches, shortest targets first; yield the indices of each minibatch's targets.

    A target has the texts from which the loss of a sample is computed. A minibatch is for one forward pass, and has at
    most `max_tokens` tokens with padding, or a single target.
    """
    order = sorted(range(len(targets)), key=lambda i: (_width(targets[i].readings), i))
    together: list[int] = []
    num_rows = 0
    for index in order:
        rows, width = len(targets[index].readings), _width(targets[index].readings)
        if together and (num_rows + rows) * width > max_tokens:
            yield together
            together, num_rows = [], 0
        together.append(index)
        num_rows += rows
    if together:
        yield together


def sample_losses(model: ModelOfLogits, targets: Sequence[Target]) -> torch.Tensor:
    """Compute the loss of `model` on each target by one forward pass, in float32: [len(targets)].

    A target has the texts from which the loss of one sample is computed. The losses have gradients if gradients are
    enabled in torch. If the texts have more than LOGITS logits, counted from the end of the shortest context to the end
    of the longest text, a `ModelInParts` computes those of scored tokens in chunks of at most LOGITS; the result then
    differs only by rounding.
    """
    rows = [reading for target in targets for reading in target.readings]
    positions = _ScoredPositions.of(rows)
    tokens, _ = _padded([reading.tokens for reading in rows])
    tokens = tokens.to(model.device)
    if isinstance(model, ModelInParts) and len(rows) * positions.num_columns * model.vocabulary > LOGITS:
        hidden = model.hidden(tokens)[:, -positions.num_columns :].flatten(0, 1)
        return _of_targets(targets, positions.in_chunks(model, hidden, len(rows)))
    logits = model.logits(tokens, positions.num_columns).flatten(0, 1)
    return _of_targets(targets, positions.log_likelihoods(logits, len(rows)))


@dataclass(frozen=True)
class _ScoredPositions:
    """Positions in a batch of texts where a token's log-probability is a part of the loss.

    The logits are [rows, num_columns, vocabulary] for the last `num_columns` columns of the texts. The three lists have
    an entry for each scored position:

    - `index`: the index of the position in the flattened rows and columns of the logits
    - `row`: the row of the position
    - `accepted`: the tokens that count as right at the position
    """

    num_columns: int
    index: list[int]
    row: list[int]
    accepted: list[tuple[int, ...]]

    @classmethod
    def of(cls, rows: Sequence[Reading]) -> _ScoredPositions:
        first = min(reading.num_context for reading in rows) - 1
        found = cls(_width(rows) - first, [], [], [])
        for row, reading in enumerate(rows):
            tokens, start = reading.tokens, reading.num_context
            wanted = [*((token,) for token in tokens[start:]), *([reading.ends] if reading.ends else [])]
            found.index.extend(row * found.num_columns + start - 1 - first + i for i in range(len(wanted)))
            found.row.extend([row] * len(wanted))
            found.accepted.extend(wanted)
        return found

    def log_likelihoods(self, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Compute the log-likelihood of each row [num_rows], from `logits` [rows x columns, vocabulary].

        A row's log-likelihood is a sum over its scored positions. Each term is the log-probability that one of the
        accepted tokens comes next.
        """
        scored = logits.index_select(0, torch.tensor(self.index, device=logits.device))
        return self._of_rows(_log_probabilities(scored, self.accepted), num_rows)

    def in_chunks(self, model: ModelInParts, hidden: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Compute the log-likelihood of each row [num_rows] with at most LOGITS logits in memory at once.

        `hidden` [rows x columns, hidden size] are the hidden states of `model`. If gradients are enabled and the scored
        positions have several chunks, the backward pass computes each chunk's logits again.
        """
        scored = hidden.index_select(0, torch.tensor(self.index, device=hidden.device))
        size = max(1, LOGITS // model.vocabulary)

        def of_chunk(states: torch.Tensor, accepted: Sequence[tuple[int, ...]]) -> torch.Tensor:
            return _log_probabilities(model.logits_of(states), accepted)

        if len(self.index) <= size:
            return self._of_rows(of_chunk(scored, self.accepted), num_rows)
        chunks = [
            checkpoint(
                of_chunk,
                scored[start : start + size],
                self.accepted[start : start + size],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, len(self.index), size)
        ]
        return self._of_rows(torch.cat(chunks), num_rows)

    def _of_rows(self, chosen: torch.Tensor, num_rows: int) -> torch.Tensor:
        return chosen.new_zeros(num_rows).index_add(0, torch.tensor(self.row, device=chosen.device), chosen)


def _log_probabilities(logits: torch.Tensor, accepted: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Log-probability [positions] that one of the `accepted` tokens of a position comes next.

    `logits` is [positions, vocabulary].
    """
    device = logits.device
    scores = logits.float().log_softmax(-1)
    choices, is_given = _padded(accepted)
    return scores.gather(-1, choices.to(device)).masked_fill(~is_given.to(device), IMPOSSIBLE).logsumexp(-1)


def _of_targets(targets: Sequence[Target], of_rows: torch.Tensor) -> torch.Tensor:
    device, starts = of_rows.device, [0]
    for target in targets:
        starts.append(starts[-1] + len(target.readings))
    index, is_given = _padded([tuple(range(start, stop)) for start, stop in pairwise(starts)])
    is_right = torch.tensor([[option in target.right for option in range(index.shape[1])] for target in targets])
    scales = torch.ones(index.shape)
    for i, target in enumerate(targets):
        if target.scales is not None:
            scales[i, : len(target.scales)] = torch.tensor(target.scales)
    is_choice = torch.tensor([target.scales is not None for target in targets], device=device)
    scores = of_rows.index_select(0, index.flatten().to(device)).view(index.shape) * scales.to(device)
    likeliest = scores.masked_fill(~is_right.to(device), IMPOSSIBLE).max(dim=1).values
    of_all = scores.masked_fill(~is_given.to(device), IMPOSSIBLE).logsumexp(dim=1)
    return torch.where(is_choice, of_all, 0) - likeliest


def _padded(rows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of numbers with zeros to the length of the longest row; return them as one matrix, and its mask.

    The mask, bool of the same shape, is False for padding.
    """
    width = max(map(len, rows))
    filled = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return filled, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def _width(readings: Sequence[Reading]) -> int:
    return max(len(reading.tokens) for reading in readings)
