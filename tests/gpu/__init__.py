"""Tests that need a CUDA device: `make test-gpu`. `make test` skips them where there is none.

Those marked `bare` need neither vLLM nor Ray nor a network, so that they run on any machine with PyTorch and the
packages that they import: `python -m pytest tests/gpu -m bare --confcutdir tests/gpu`. The tests in `engines` start
engines. One process runs all of them, one engine at a time, and they print what they measured.

`GPU_TESTS_ON=cpu python -m pytest tests/gpu` runs the tests in `engines` on a machine without a GPU, except for what
only a GPU has, so that their code is tested before it first runs on one.
"""
