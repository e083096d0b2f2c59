"""HM3's lower level: an actor-critic that learns which layer of which model comes next.

"HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models", as its authors describe it to their reviewers.
The state is the path so far, an action is a layer of a model or the end; the reward is known once the whole path is
scored. Torch only: who scores a path, and where it is stored, is not known here.

The parts have the names that RLlib gives to such parts: a module of networks, a runner that plays episodes with it, a
learner that improves it. RLlib's own PPO is not used: its modules map an observation to a distribution over actions,
whereas Wolpertinger's action is found with the values of the states after k candidates, so that it would have to be
hidden in an environment that knows the networks; its runners own their environments and wait for each reward, whereas
an episode here is a trial in a store, scored anywhere and perhaps after a restart; and its sampling depends on which
runner plays, whereas episode n here is a function of the seed, n and the networks.

- `pool`: which steps there are, and which may come next
- `networks`: from the path so far to a state, a proto-action and the outcomes that are expected
- `wolpertinger`: from a proto-action to a step
- `episodes`: one path, played with given networks
- `ppo`: advantages and losses, as formulas on tensors
- `learner`: improves networks by the episodes of one iteration; checkpoints
- `training`: which networks play which episode, with which preference
- `descriptors`: statistics of each layer's weights
"""
