"""Fitting of the alignment between two layers to the layers' activations.

A pair is (the layer before the alignment, the layer after it). X [N, D] is the output of the first layer in its own
model, and Y [N, D] is the input of the second layer in its own model, both for the same texts. The maps `moments`
and `mlp` give X the distribution of Y, and do not compare activations token by token; `ridge` does.

- `moments`: y = scale * x + shift for each channel, so that mean and variance are equal.
- `mlp`: y = P x + shift, where P = diag(scale) + U V^T is the output of a light network with two hidden layers, given
  the statistics of every channel in X and Y. It starts as `moments`. Training minimises the loss of HM3's authors:
  squared errors of mean and variance, and CORAL of the covariances. Training stops early, and the epoch with the least
  loss on held-out rows is kept, so an `mlp` is never worse than `moments` on these rows.

- `ridge`: y = P x + shift, by least squares over the tokens, with a penalty on the squares of P's elements (ridge
  regression). The penalty with the least squared error on held-out rows is taken. This is the kind for models whose
  channels do not correspond, such as models of different widths: stitching layers (Lenc and Vedaldi 2015, Bansal et
  al. 2021) are such maps.

A map is fitted to all tokens except the first of each text, and applied to all tokens. In trained models the first
token has values in a few channels that are larger than all others by orders of magnitude, from an early layer on. In
such a channel, the slope of the map is the slope of the line through two points: the mean of the other tokens and the
mean of the first tokens. `mlp` neither changes this channel nor adds it to other channels. With `ridge` these channels
of x take no part in the regression; they carry what the regression lacks to map the mean of the first tokens of x to
that of y, whose large channels may be others. So the first token gets values of the size for which the next layer was
trained.

The authors give the losses, two hidden layers and 5 to 15 epochs. The form of P, the statistics that the network
receives and all other numbers were chosen here. A dense D x D output would have more weights than the two layers.

Axes: N tokens, D channels of the residual stream, R directions, F statistics of a channel.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, fields
from typing import Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from workers.alignments.alignment import Alignment

__all__ = [
    "KINDS",
    "FittedAlignment",
    "Kind",
    "MlpOptions",
    "discrepancy",
    "fit_alignment",
    "fit_mlp",
    "fit_moments",
    "fit_ridge",
]

Kind = Literal["moments", "mlp", "ridge"]
KINDS: tuple[Kind, ...] = ("moments", "mlp", "ridge")

# The penalties among which the kind `ridge` chooses, as shares of the mean variance of the free channels of x.
PENALTIES = tuple(10.0**exponent for exponent in range(-6, 2))

# The number of channels of y, evenly spaced, whose errors on held-out rows choose the penalty.
JUDGED_CHANNELS = 256

# Channels whose standard deviation is a smaller share of the root mean square over all channels are only shifted.
SMALLEST_DEVIATION = 1e-3

# Standard deviations of a channel by which the first tokens are beyond the others in a model with massive activations.
OUTLIER = 20.0


@dataclass(frozen=True)
class FittedAlignment:
    """An alignment, and numbers that say how well it fits the activations of held-out texts.

    An alignment is a map of the residual stream between two layers. The function `discrepancy` compares the mapped
    output of the first layer with the usual input of the second layer. The discrepancy is 0 if the means and
    covariances are equal.

    - `before`: the discrepancy without an alignment
    - `moments`: the discrepancy with an alignment of kind `moments` (a scale and a shift for each channel)
    - `after`: the discrepancy with this alignment
    - `epochs`: the number of epochs of training; 0 for alignments of the kinds `moments` and `ridge`
    """

    alignment: Alignment
    before: float
    moments: float
    after: float
    epochs: int = 0

    def to_bytes(self) -> bytes:
        """Serialise the alignment, a map of the residual stream, and its quality of fit as a safetensors file.

        Equal objects give equal bytes.
        """
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "alignment"}
        content: bytes = safetensors.torch.save(
            self.alignment.tensors(), {"alignment": json.dumps(numbers, sort_keys=True)}
        )
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> FittedAlignment:
        """Read the content of a safetensors file made by the method `to_bytes`. Raises ValueError for other content."""
        try:
            found = safetensors.torch.load(content)
            size = int.from_bytes(content[:8], "little")
            numbers = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["alignment"])
            return cls(Alignment(**found), **numbers)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not an alignment: {error!r}") from error


@dataclass(frozen=True)
class MlpOptions:
    """Options for training the network that computes an alignment of the kind `mlp`.

    The alignment is a map of the residual stream; its matrix is the sum of a diagonal and a matrix of rank `rank`.
    `hidden_size` is the width of the network's two hidden layers, and `learning_rate` is Adam's learning rate. An epoch
    uses all rows of activations once, `batch` rows at a time; there are at most `epochs` epochs. Training ends after
    `patience` epochs without improvement on held-out rows.
    """

    rank: int = 8
    hidden_size: int = 64
    learning_rate: float = 3e-3
    epochs: int = 15
    patience: int = 5
    batch: int = 256


def discrepancy(x_ND: Tensor, y_ND: Tensor) -> Tensor:
    """Distance between the distributions of activations x and y; 0 for equal means and covariances.

    Rows of `x_ND` and `y_ND` are tokens, columns are the D channels. The distance is the sum of three terms, in units
    of the mean variance of y:

    - the mean squared difference of the channels' means
    - the mean squared difference of the channels' variances
    - CORAL: |C_x - C_y|^2 / (4 D^2), with C_x and C_y the covariance matrices of the rows x and y (Sun and Saenko,
      "Deep CORAL", 2016, equation 1)
    """
    unit = y_ND.var(dim=0).mean().clamp(min=torch.finfo(torch.float32).tiny)
    means = ((x_ND.mean(dim=0) - y_ND.mean(dim=0)) ** 2).mean() / unit
    variances = ((x_ND.var(dim=0) - y_ND.var(dim=0)) ** 2).mean() / unit**2
    coral = ((_covariance(x_ND) - _covariance(y_ND)) ** 2).sum() / (4 * x_ND.shape[1] ** 2) / unit**2
    return means + variances + coral


def fit_moments(x_ND: Tensor, y_ND: Tensor, *, first: tuple[Tensor, Tensor] | None = None) -> Alignment:
    """Fit an alignment that gives each channel of activations x the mean and variance of the channel in activations y.

    Rows of `x_ND` and `y_ND` are tokens, columns are the channels of the residual stream. A channel of x that is nearly
    constant is only shifted.

    `first` has, for x and for y, the activations [texts, channels] of the first tokens of texts; these tokens are not
    among the rows. In some channels the first tokens are outliers in both x and y. Such a channel gets the straight
    line that maps the mean of the rows of x to that of y, and the mean of the first tokens of x to that of y; the
    variance may then differ. With `first` None, no channel is treated in this way.
    """
    _check(x_ND, y_ND)
    x, y = x_ND.float(), y_ND.float()
    std_x, std_y = x.std(dim=0), y.std(dim=0)
    floor = SMALLEST_DEVIATION * std_x.square().mean().sqrt()
    scale = torch.where(std_x > floor, std_y / std_x.clamp(min=torch.finfo(torch.float32).tiny), 1.0)
    if first is not None:
        slope = (first[1].float().mean(dim=0) - y.mean(dim=0)) / (first[0].float().mean(dim=0) - x.mean(dim=0))
        are_outliers = _are_outliers(first[0], x) & _are_outliers(first[1], y)
        scale = torch.where(are_outliers & (slope > 0), slope, scale)
    return Alignment(scale=scale, shift=y.mean(dim=0) - scale * x.mean(dim=0))


def fit_alignment(
    kind: Kind,
    x_ND: Tensor,
    y_ND: Tensor,
    is_held_out: Tensor,
    *,
    first: tuple[Tensor, Tensor] | None = None,
    options: MlpOptions | None = None,
) -> FittedAlignment:
    """Fit an alignment of kind `kind` from activations x, one layer's output, to activations y, another layer's input.

    The kind `moments` scales and shifts each channel; the kind `mlp` is a matrix and a shift that a small network
    computes; the kind `ridge` is a matrix and a shift by ridge regression. Rows of `x_ND` and `y_ND` are tokens,
    columns are channels; row n of both is the same token. `is_held_out` [N] is true for the rows of held-out texts. The
    map is not fitted to these rows: they measure the result's quality (function `discrepancy`), the kind `mlp` keeps
    the epoch with the smallest discrepancy, and the kind `ridge` the penalty with the smallest squared error. `first`
    contains the activations of the texts' first tokens in x and in y, or is None if they are unknown. These tokens are
    not among the rows of `x_ND` and `y_ND`. `options` are for the kind `mlp`; None means the defaults.
    """
    train = (x_ND[~is_held_out], y_ND[~is_held_out])
    out = (x_ND[is_held_out], y_ND[is_held_out])
    if kind == "mlp":
        return fit_mlp(train, out, seed=0, first=first, options=options)
    moments = fit_moments(*train, first=first)
    alignment = fit_ridge(train, out, first=first) if kind == "ridge" else moments
    plain, after = (float(discrepancy(each(out[0].float()), out[1].float())) for each in (moments, alignment))
    return FittedAlignment(alignment, float(discrepancy(*out)), plain, after)


def fit_ridge(
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    first: tuple[Tensor, Tensor] | None = None,
) -> Alignment:
    """Fit a matrix and a shift that map activations x to activations y of the same tokens, by ridge regression.

    The arguments are those of the function `fit_mlp`. The penalty is the one of PENALTIES with the smallest squared
    error on the held-out rows, over JUDGED_CHANNELS channels of y. Channels of x in which the first tokens are outliers
    take no part in the regression. They have the coefficients with which the mean of the first tokens of x becomes that
    of y. Computed in float64; equal arguments give equal bits on one machine with one number of threads.
    """
    _check(*train)
    x, y = train[0].double(), train[1].double()
    is_outlier = (
        torch.zeros(x.shape[1], dtype=torch.bool) if first is None else _are_outliers(first[0], train[0].float())
    )
    mean_x, mean_y = x.mean(dim=0), y.mean(dim=0)
    free = torch.nonzero(~is_outlier).flatten()
    inputs, outputs = (x - mean_x)[:, free], y - mean_y
    gram, cross = inputs.T @ inputs, inputs.T @ outputs
    unit = gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    # The penalty is chosen by a part of the channels of y: to solve for all takes most of the time of wide models.
    judged = torch.linspace(0, y.shape[1] - 1, min(y.shape[1], JUDGED_CHANNELS), dtype=x.dtype).round().long()
    out_x, out_y = (held_out[0].double() - mean_x)[:, free], (held_out[1].double() - mean_y)[:, judged]
    factor, least = torch.eye(len(free), dtype=x.dtype), math.inf
    for penalty in PENALTIES:
        tried = torch.linalg.cholesky(gram + penalty * unit * torch.eye(len(free), dtype=x.dtype))
        if (error := float((out_x @ torch.cholesky_solve(cross[:, judged], tried) - out_y).square().mean())) < least:
            factor, least = tried, error
    found = torch.cholesky_solve(cross, factor)
    projection = torch.zeros(y.shape[1], x.shape[1], dtype=x.dtype)
    projection[:, free] = found.T
    if first is not None and is_outlier.any():
        away = first[0].double().mean(dim=0) - mean_x
        missing = first[1].double().mean(dim=0) - mean_y - projection @ away
        outliers = torch.where(is_outlier, away, 0.0)
        projection += torch.outer(missing, outliers / outliers.square().sum())
    shift = mean_y - projection @ mean_x
    return Alignment(projection=projection.float(), shift=shift.float())


def fit_mlp(
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    seed: int,
    first: tuple[Tensor, Tensor] | None = None,
    options: MlpOptions | None = None,
) -> FittedAlignment:
    """Train a small network that maps activations x to the distribution of y; return the alignment that it computes.

    `train` and `held_out` are each a pair (x, y) of activations, with a row for each token: the output of one layer,
    and the input of the layer that follows the alignment. `first` contains the activations of the texts' first tokens
    in x and in y; these tokens are not among the rows. In channels of x in which the first tokens are outliers, the
    alignment stays as the function `fit_moments` fits it. The epoch with the smallest result of the function
    `discrepancy` on the held-out rows is kept. `options` are the sizes and the learning rate; None means the defaults.
    `seed` fixes the initial weights and the order of rows. Equal arguments give equal bits on one machine with one
    number of threads.
    """
    _check(*train)
    chosen = options or MlpOptions()
    x, y = train[0].float(), train[1].float()
    moments = fit_moments(x, y, first=first)
    is_free = torch.ones(x.shape[1], dtype=torch.bool) if first is None else ~_are_outliers(first[0], x)
    out_x, out_y = held_out[0].float(), held_out[1].float()
    before, plain = float(discrepancy(out_x, out_y)), float(discrepancy(moments(out_x), out_y))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projection = _Projection(moments, _statistics(x, y, chosen.rank), is_free, chosen)
    optimizer = torch.optim.Adam(projection.parameters(), lr=chosen.learning_rate)
    order = torch.Generator().manual_seed(seed)
    best, best_state, waited, epoch = plain, copy.deepcopy(projection.state_dict()), 0, 0
    while epoch < chosen.epochs and waited < chosen.patience:
        epoch += 1
        for rows in _batches(len(x), chosen.batch, order):
            loss = discrepancy(projection(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            now = float(discrepancy(projection(out_x), out_y))
        if now < best:
            best, best_state, waited = now, copy.deepcopy(projection.state_dict()), 0
        else:
            waited += 1
    projection.load_state_dict(best_state)
    return FittedAlignment(projection.alignment(), before, plain, best, epoch)


class _Projection(nn.Module):
    """Network that computes a projection [D, D] and a shift [D] from `statistics` [D, F] of the D channels.

    Projection and shift are an alignment, a map of the residual stream. The projection is diag(scale) + U V^T with U
    and V of low rank. Before training, projection and shift are as in `moments`, an alignment that only scales and
    shifts each channel. Channels for which `is_free` [D] is False stay as in `moments`.
    """

    def __init__(self, moments: Alignment, statistics: Tensor, is_free: Tensor, options: MlpOptions) -> None:
        super().__init__()
        hidden, rank = options.hidden_size, options.rank
        self.scale: Tensor
        self.shift: Tensor
        self.statistics: Tensor
        self.is_free: Tensor
        self.register_buffer("scale", moments.tensors()["scale"], persistent=False)
        self.register_buffer("shift", moments.tensors()["shift"], persistent=False)
        self.register_buffer("statistics", statistics, persistent=False)
        self.register_buffer("is_free", is_free, persistent=False)
        last = nn.Linear(hidden, 2 * rank + 2)
        # Initially V is random and all else is 0, so that P is diag(scale) and U has a gradient.
        nn.init.zeros_(last.weight[: rank + 2])
        nn.init.zeros_(last.bias)
        size = statistics.shape[1]
        self.network = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), last)
        self.rank = rank

    def forward(self, x_ND: Tensor) -> Tensor:
        scale, shift, u, v = self._parts()
        return x_ND * scale + (x_ND @ v) @ u.T + shift

    @torch.no_grad()
    def alignment(self) -> Alignment:
        scale, shift, u, v = self._parts()
        return Alignment(projection=torch.diag(scale) + u @ v.T, shift=shift)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = self.network(self.statistics)
        found = found * self.is_free[:, None]
        stretch, move = found[:, 0], found[:, 1]
        u, v = found[:, 2 : 2 + self.rank], found[:, 2 + self.rank :]
        typical = self.scale.abs().mean()
        scale = self.scale * stretch.exp()
        return scale, self.shift + move * typical, typical * u, v / len(v) ** 0.5


@torch.no_grad()
def _statistics(x: Tensor, y: Tensor, rank: int) -> Tensor:
    """Summarise each of D channels by F numbers, computed from activations x and y. Returns [D, F].

    Rows of x and y are tokens. The numbers of a channel are its mean, the logarithm of its standard deviation, its
    skewness, the logarithm of one plus its kurtosis, and its components in the `rank` directions of largest variance.
    The numbers in x come first, then the numbers in y. Each number is standardised over the channels.
    """
    parts = [part for rows in (x, y) for part in (*_of_channels(rows), *_directions(rows, rank).T)]
    found = torch.stack(parts, dim=1)
    return (found - found.mean(dim=0)) / found.std(dim=0).clamp(min=1e-6)


def _of_channels(rows: Tensor) -> tuple[Tensor, ...]:
    mean, std = rows.mean(dim=0), rows.std(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
    z = (rows - mean) / std
    return mean, std.log(), (z**3).mean(dim=0), (z**4).mean(dim=0).log1p()


def _directions(rows: Tensor, rank: int) -> Tensor:
    """Principal directions (of largest variance) of `rows` [tokens, channels], as `rank` columns of [channels, rank].

    If there are fewer than `rank` tokens or channels, the last columns are 0.
    """
    size = min(rank, *rows.shape)
    found = torch.zeros(rows.shape[1], rank)
    found[:, :size] = torch.pca_lowrank(rows, q=size)[2]
    return found


def _are_outliers(first_TD: Tensor, rows_ND: Tensor) -> Tensor:
    """Channels (bool [D]) whose mean over T first tokens of texts is far from their mean over other tokens.

    `first_TD` has the first tokens, and `rows_ND` has the other tokens. Far means more than OUTLIER standard deviations
    of the other tokens.
    """
    beyond = (first_TD.float().mean(dim=0) - rows_ND.mean(dim=0)).abs()
    return beyond > OUTLIER * rows_ND.std(dim=0)


def _batches(num: int, size: int, order: torch.Generator) -> list[Tensor]:
    """Shuffle the indices of `num` rows with the generator `order`, and split them into batches of similar size.

    A batch has at most `size` rows, or at most two if `size` is below two.
    """
    return list(torch.randperm(num, generator=order).chunk(max(1, -(-num // max(size, 2)))))


def _covariance(rows: Tensor) -> Tensor:
    centred = rows - rows.mean(dim=0)
    return centred.T @ centred / (len(rows) - 1)


def _check(x: Tensor, y: Tensor) -> None:
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"layers of {x.shape[1]} and {y.shape[1]} channels cannot be aligned; give equal hidden sizes")
    if len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} rows of activations; both layers read the same texts")
    if len(x) < 2:
        raise ValueError(f"{len(x)} rows of activations have no variance; give at least 2")
