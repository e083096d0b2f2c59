"""Expansion of models of different widths, depths and kinds to one form, which leaves what they compute unchanged.

The layers of a layer path have one shape and are computed in one way. Models that differ can be in one path after they
are expanded:

- Channels of the residual stream, of the MLP, and attention heads that a model lacks are zeros, which add nothing.
- RMSNorm divides by the root mean square over all channels. With D channels instead of d it is smaller by the factor
  sqrt(d / D), so the norms' weights are multiplied by this factor.
- A model with more query heads for each key-value head than the common shape has its key and value heads repeated.
- Layers that a model lacks have projections of zeros, so they add nothing. They are spread evenly over the depth.
- Rows of the vocabulary without a token are cut, because rows of zeros could have the largest logit.
- Models of the types Llama, Mistral and Qwen2 become Llamas; biases that a model lacks are zeros.
- A rotary embedding turns pairs of channels of a head, each with a frequency. If the models' frequencies differ, heads
  get a pair for each of them, and a model's other pairs are zeros. Queries are multiplied by a factor, because
  attention divides by the square root of a head's size.
- If `rms_norm_eps` differs, the residual stream of a model is multiplied by a factor that has the same effect on norms.

The logits are those of the model, except for rounding and for the constant `rms_norm_eps` in norms, which counts
D / d times as much relative to the mean square. Net2Net (arXiv:1511.05641) introduced such expansions.

Models with other tokens are converted to the tokens of one of them on request. This changes what they compute.

- `form`: the common form of several models: sizes, rotary embedding and other settings
- `rotary`: rotary embeddings: their frequencies, and one embedding that has those of several models
- `expanded_model`: the tensors and the configuration of a model in the common form
- `tokens`: rows of a vocabulary for the tokens of another model
- `files`: writes expanded models
"""
