"""What computes with merged weights: `vllm` scores them, `transformers` checks what it scored."""
