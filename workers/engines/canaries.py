"""How often engines are compared with transformers (canaries), and the number and length of the prompts for it."""

from __future__ import annotations

__all__ = ["CANARY_EVERY", "CANARY_TOKENS", "NUM_PROMPTS"]

CANARY_EVERY = 32  # swaps
NUM_PROMPTS = 4
CANARY_TOKENS = 48  # of each prompt, at most
