"""Tests that need a CUDA device: `make test-gpu`. `make test` skips them where there is none.

They need neither vLLM nor Ray nor a network, so that they run on any machine with PyTorch and the packages that they
import: `python -m pytest tests/gpu --confcutdir tests/gpu`. One process runs them, and they print what they measured.
"""
