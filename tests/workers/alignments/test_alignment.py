"""The values that an alignment computes from a residual stream."""

from __future__ import annotations

from dataclasses import replace

import torch

from workers.alignments.alignment import Alignment


def test_what_an_alignment_computes() -> None:
    stream = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    moments = Alignment(scale=torch.tensor([2.0, 0.5]), shift=torch.tensor([1.0, -1.0]))
    assert moments(stream).tolist() == [[3.0, 0.0], [7.0, 1.0]]
    assert moments(stream, 0.5).tolist() == [[2.5, 0.5], [6.5, 1.5]]
    projection = Alignment(projection=torch.tensor([[0.0, 1.0], [2.0, 0.0]]), shift=torch.tensor([1.0, 0.0]))
    assert projection(stream).tolist() == [[3.0, 2.0], [5.0, 6.0]]
    assert replace(projection, shift=None)(stream, 0.5).tolist() == [[2.0, 2.0], [4.0, 6.0]]
