"""HM3's lower level: an actor-critic that learns which layer of which model comes next.

The paper is "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models", as its authors describe it to
their reviewers. The state is the path so far, an action is a layer of a model or the end; the reward is known once the
whole path is scored. The package needs torch only, and does not know who scores a path or where it is stored.

The parts have RLlib's names: a module of networks, a runner that plays episodes with it, a learner that improves it.
RLlib's own Learner would fit, and is compared with ours in tests/benchmarks/bench_hm3_rllib.py; docs/hm3.md says why it
is not used. Its runners do not fit: they wait for each reward, whereas an episode here is a trial in a store, scored
anywhere and perhaps after a restart.

- `pool`: which steps there are, and which may come next
- `networks`: from the path so far to a state, a proto-action and the expected outcomes
- `wolpertinger`: from a proto-action to a step
- `episodes`: one path, played with given networks
- `ppo`: advantages and losses, as formulas on tensors
- `scalarisation`: from the values of several objectives to one outcome
- `actions`: the distributions from which a policy draws its actions
- `learner`: improves networks by the episodes of one iteration; checkpoints
- `first_learner`: the learner of studies of version 1 of the searcher
- `training`: which networks play which episode, with which preference
- `descriptors`: statistics of each layer's weights
"""
