"""Tests of vLLM engines on a GPU, whose merges are compared with transformers.

`GPU_TESTS_ON=cpu` runs them on the CPU, in float32 and with vLLM's model runner V1: everything but CUDA graphs, the
model runner V2, which needs Triton, and GPU memory. What is left out there is skipped with its reason.
"""
