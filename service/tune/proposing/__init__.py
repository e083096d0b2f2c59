"""How proposals come about while the driver works.

- `proposals`: the results that a proposal may use, the protocol of what computes proposals, and the storing of steps
- `ray_proposer`: the searcher on Ray, in a process of its own
- `checkpoints`: a searcher with its steps, and the policies that it has learned as artifacts
- `completions`: the sources' own correct completions, as references
- `alignments`: what stands between layers of different models, learned by Ray tasks
- `gradient_actor`: what computes a searcher's steps: losses and gradients by the parameters of a space
"""
