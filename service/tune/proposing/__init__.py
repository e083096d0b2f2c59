"""Computation of proposals by Ray actors, while the driver does other work.

- `proposals`: the results that a proposal may use, the interface of objects that compute proposals, and how steps are
  stored
- `ray_proposer`: the searcher on Ray, in a separate process
- `searcher_state`: the searcher's actor, with the steps and checkpoints of its study
- `checkpoints`: checkpoints of policies, stored as artifacts
- `completions`: correct completions of the source models, which gradients use as reference answers
- `alignments`: alignments (maps of the residual stream) between layers, learned by Ray tasks
- `gradient_actor`: computes losses and their gradients with respect to the coefficients of merges
- `ray_gradients`: the gradient actor on Ray
"""
