"""Tests of vLLM engines on a GPU, whose merges are compared with transformers.

`GPU_TESTS_ON=cpu` runs them on the CPU, eagerly, in float32 and with vLLM's model runner V1. Left out are CUDA graphs,
the model runner V2, which needs Triton, and GPU memory; such tests are skipped with their reason.
"""
