"""The lower level of HM3: an actor-critic that learns to choose the next layer of a layer path.

The paper is "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models" (arXiv:2409.18893). A layer path is
a sequence of steps, each of which is a layer of one of several models. The state is the path so far. An action is the
next layer, or the end of the path. A policy may first draw a proto-action, which is a point in the space of the steps'
embeddings, and then choose a step near it. The reward is known once the whole path is scored. The package needs torch
only. The package does not depend on how paths are scored, or where scores are stored.

The parts have RLlib's names: a module of networks, a runner that builds episodes with the networks, and a learner that
improves them. RLlib's own Learner would fit. tests/benchmarks/bench_hm3_rllib.py compares it with the learner of this
package, and docs/hm3.md says why it is not used. RLlib's runners do not fit, because they wait for each reward. Here an
episode is a trial in a store, which any replica scores, perhaps after a restart.

- `pool`: the steps that a path may have, and the steps that may come next
- `networks`: networks that compute a state, a proto-action and the expected outcomes from the path so far
- `wolpertinger`: choice of a step from a proto-action
- `episodes`: the runner, which builds paths with given networks
- `ppo`: advantages and losses, as formulas on tensors
- `scalarisation`: functions from the values of several objectives to one outcome
- `actions`: the distributions from which a policy draws its actions
- `learner`: the learner, which improves networks by the episodes of one iteration; its checkpoints
- `first_learner`: the learner of studies of version 1 of the searcher
- `training`: the networks and the preference vector of each episode
- `descriptors`: statistics of each layer's weights
"""
