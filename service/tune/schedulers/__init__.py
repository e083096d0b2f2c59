"""When trials are promoted from rung to rung, and which results a proposal may know.

- `base`: the table of rungs and brackets that every scheduler keeps
- `successive_halving`: Hyperband, ASHA, and one rung without promotion
"""
