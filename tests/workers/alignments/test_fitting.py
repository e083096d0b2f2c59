"""Fitted maps between layers: moments computed by hand, and a network that is never worse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from workers.alignments.alignment import Alignment
from workers.alignments.fitting import (
    KINDS,
    FittedAlignment,
    Kind,
    MlpOptions,
    discrepancy,
    fit_alignment,
    fit_mlp,
    fit_moments,
    fit_ridge,
)

QUICK = MlpOptions(epochs=6, batch=128)


def scale_of(aligned: FittedAlignment) -> torch.Tensor:
    return aligned.alignment.tensors()["scale"]


def rows(num: int, channels: int, *, seed: int, mixes: float = 0.0) -> torch.Tensor:
    """Random activations, [num, channels], with a mean and deviation per channel; `mixes` > 0 makes them correlated."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(num, channels, generator=generator)
    shared = torch.randn(num, 1, generator=generator)
    own = torch.rand(channels, generator=generator) + 0.5
    return (plain + mixes * shared) * own + torch.randn(channels, generator=generator)


# Formulas.


def test_the_discrepancy_is_that_of_mean_variance_and_covariance() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 2.0]])  # means 1, variances 2, covariance 2
    y = torch.tensor([[1.0, 4.0], [3.0, 2.0]])  # means 2 and 3, variances 2, covariance -2
    # Unit 2: means (1 + 4) / 2 / 2, variances 0, CORAL 2 * 4^2 / (4 * 2^2) / 2^2.
    assert float(discrepancy(x, y)) == pytest.approx(1.25 + 0.5)
    assert float(discrepancy(x, x)) == 0


def test_moments_are_matched_and_constant_channels_only_shifted() -> None:
    x = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
    y = torch.tensor([[10.0, 1.0], [16.0, 3.0]])
    found = fit_moments(x, y)
    assert {name: tensor.tolist() for name, tensor in found.tensors().items()} == {
        "scale": [3.0, 1.0],
        "shift": [10.0, -3.0],
    }
    assert found(x).tolist() == [[10.0, 2.0], [16.0, 2.0]]
    assert found.to(dtype=torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16


def test_a_projection_is_applied_as_a_matrix() -> None:
    found = Alignment(projection=torch.tensor([[1.0, 2.0], [0.0, 1.0]]), shift=torch.tensor([0.5, 0.0]))
    assert found(torch.tensor([[1.0, 1.0]])).tolist() == [[3.5, 1.0]]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(4, 3), "layers of 2 and 3 channels cannot be aligned; give equal hidden sizes"),
        (torch.zeros(1, 2), torch.zeros(1, 2), "1 rows of activations have no variance; give at least 2"),
        (torch.zeros(3, 2), torch.zeros(4, 2), "3 and 4 rows of activations; both layers read the same texts"),
    ],
)
def test_what_cannot_be_aligned_is_refused(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_moments(x, y)
    with pytest.raises(ValueError, match=message):
        fit_mlp((x, y), (x, y), seed=0)


# First tokens.

SINK = 3


def with_sink(tokens: torch.Tensor, value: float) -> torch.Tensor:
    """Activations of the first tokens of texts, in a model where the channel SINK has a huge value for them."""
    first = tokens[:12].clone()
    first[:, SINK] = value + torch.arange(12) / 10
    return first


@pytest.mark.parametrize("kind", KINDS)
def test_huge_first_tokens_become_those_of_the_next_layer(kind: Kind) -> None:
    """An alignment moves a first token's huge value to that of the other model; kinds but `ridge`, no other channel."""
    x, y = rows(1800, 12, seed=0), rows(1800, 12, seed=1, mixes=2.0)
    first = with_sink(x, 900.0), with_sink(y, 600.0)
    held_out = torch.arange(1800) % 5 == 4
    plain = fit_alignment(kind, x, y, held_out, options=QUICK).alignment
    found = fit_alignment(kind, x, y, held_out, first=first, options=QUICK)
    away = (plain(first[0])[:, SINK] / first[1][:, SINK] - 1).abs()
    assert away.min() > 0.3, "what a map of the other tokens alone does"
    assert torch.allclose(found.alignment(first[0])[:, SINK], first[1][:, SINK], rtol=1e-2)
    moderate = first[0].clone()
    moderate[:, SINK] = 0.0
    difference = found.alignment(first[0]) - found.alignment(moderate)
    others = torch.arange(12) != SINK
    if kind == "ridge":
        assert torch.allclose(found.alignment(first[0]).mean(0), first[1].mean(0), atol=1e-2)
    else:
        assert difference[:, others].abs().max() == 0
    assert found.after < 0.8 * found.before, "the other tokens are still aligned"


def test_huge_first_tokens_may_be_in_other_channels() -> None:
    """`ridge` moves them to the channel of the next model, for which channels do not correspond."""
    rotation = torch.linalg.qr(rows(32, 32, seed=2))[0]
    x = rows(2000, 32, seed=0)
    y = x @ rotation + 0.05 * rows(2000, 32, seed=1)
    first = with_sink(x, 200.0), x[:12] @ rotation
    first[1][:, 7] = 200.0
    held_out = torch.arange(2000) % 5 == 4
    found = fit_alignment("ridge", x, y, held_out, first=first).alignment
    mapped = found(first[0])
    assert torch.allclose(mapped[:, 7], first[1][:, 7], rtol=2e-2)
    assert (mapped - first[1]).norm() < 0.05 * first[1].norm()
    error = (found(x[held_out]) - y[held_out]).square().mean() / y.var(dim=0).mean()
    assert error < 0.15, "the other tokens are mapped one by one"


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_first_tokens_change_nothing(kind: Kind) -> None:
    x, y = rows(300, 8, seed=0), rows(300, 8, seed=1, mixes=1.0)
    held_out = torch.arange(300) % 5 == 4
    for first in ((x[:9], y[:9]), (with_sink(x, 10.0), with_sink(y, 10.0))):
        found = fit_alignment(kind, x, y, held_out, first=first, options=QUICK)
        assert found.to_bytes() == fit_alignment(kind, x, y, held_out, options=QUICK).to_bytes()


def test_first_tokens_huge_in_one_model_change_nothing() -> None:
    """There the scale still gives the channel its variance."""
    x, y = rows(300, 8, seed=0), rows(300, 8, seed=1)
    expected = fit_moments(x, y)
    for first in (
        (with_sink(x, 900.0), y[:12]),
        (x[:12], with_sink(y, 900.0)),
        (with_sink(x, -900.0), with_sink(y, 900.0)),
    ):
        assert torch.equal(fit_moments(x, y, first=first).tensors()["scale"], expected.tensors()["scale"])


# Regression.


def test_regression_finds_the_map_between_tokens() -> None:
    """`ridge` finds an affine function of x if y is one, and `mlp` only matches the distribution."""
    x = rows(900, 12, seed=0, mixes=1.0)
    matrix = rows(12, 12, seed=1)
    y = x @ matrix.T + 3.0
    held_out = torch.arange(900) % 5 == 4
    found = fit_alignment("ridge", x, y, held_out)
    assert torch.allclose(found.alignment.tensors()["projection"], matrix, atol=1e-3)
    assert torch.allclose(found.alignment(x), y, atol=1e-2)
    assert found.after < 1e-6 < found.before
    other = fit_alignment("mlp", x, y, held_out, options=QUICK).alignment
    assert (other(x) - y).square().mean() > 0.3 * y.var()


def test_held_out_rows_choose_the_penalty() -> None:
    """With as many channels as tokens and noise, least squares without a penalty would be worse than the mean."""
    x, matrix = rows(60, 40, seed=0), rows(40, 40, seed=1) / 40
    y = x @ matrix.T + rows(60, 40, seed=2)
    train, out = (x[:48], y[:48]), (x[48:], y[48:])
    found = fit_ridge(train, out)
    plain = torch.linalg.lstsq(train[0] - train[0].mean(0), train[1] - train[1].mean(0)).solution
    error = (found(out[0]) - out[1]).square().mean()
    assert error < (out[1] - train[1].mean(0)).square().mean() * 1.05
    assert error < 0.7 * ((out[0] - train[0].mean(0)) @ plain + train[1].mean(0) - out[1]).square().mean()


# The network.


def test_the_network_learns_covariances_that_moments_leave() -> None:
    x, y = rows(1800, 12, seed=0), rows(1800, 12, seed=1, mixes=2.0)
    out = (x[1400:], y[1400:])
    learned = fit_mlp((x[:1400], y[:1400]), out, seed=0)
    assert learned.after < 0.7 * learned.moments < learned.before
    assert learned.alignment.tensors()["projection"].shape == (12, 12)
    # What is stated is what the projection does.
    assert float(discrepancy(learned.alignment(out[0]), out[1])) == pytest.approx(learned.after, rel=1e-4)


def test_fitting_stops_early() -> None:
    """Fitting stops early with moments where held-out rows gain nothing."""
    x, y = rows(300, 6, seed=0), rows(300, 6, seed=1)
    moments = fit_moments(x, y)
    held_out = (x, moments(x))  # nothing is left to gain
    learned = fit_mlp((x, y), held_out, seed=0, options=MlpOptions(epochs=15, patience=2))
    assert learned.epochs == 2
    assert learned.after == learned.moments
    found, expected = learned.alignment.tensors(), moments.tensors()
    assert torch.allclose(found["projection"], torch.diag(expected["scale"]))
    assert torch.allclose(found["shift"], expected["shift"])


def test_it_is_the_same_again_and_no_random_state_moves() -> None:
    x, y = rows(100, 5, seed=0), rows(100, 5, seed=1, mixes=1.0)
    torch.manual_seed(3)
    first = fit_mlp((x, y), (x, y), seed=4, options=QUICK)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert fit_mlp((x, y), (x, y), seed=4, options=QUICK).to_bytes() == first.to_bytes()


def test_an_alignment_is_read_back() -> None:
    x, y = rows(60, 5, seed=0), rows(60, 5, seed=1)
    first = fit_alignment("moments", x, y, torch.arange(60) % 5 == 4)
    again = FittedAlignment.from_bytes(first.to_bytes())
    assert torch.equal(scale_of(again), scale_of(first))
    assert (again.before, again.moments, again.after, again.epochs) == (first.before, first.after, first.after, 0)
    for content in (b"", b"{}", first.to_bytes()[:40], save({"before": x})):
        with pytest.raises(ValueError, match="not an alignment"):
            FittedAlignment.from_bytes(content)


def test_held_out_rows_are_not_learned_from() -> None:
    x, y = rows(60, 5, seed=0), rows(60, 5, seed=1)
    held_out = torch.arange(60) % 5 == 4
    damaged = torch.where(held_out[:, None], 1e6, x)
    assert torch.equal(
        scale_of(fit_alignment("moments", x, y, held_out)), scale_of(fit_alignment("moments", damaged, y, held_out))
    )
