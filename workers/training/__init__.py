"""Training: derivatives of losses with respect to the coefficients of a merge, and experts made to be merged.

- `gradients`: the losses of a recipe on a minibatch, and their derivatives with respect to its coefficients
- `model`: a transformers model into which merges are written
- `memory`: lets a process keep freed memory for its next step
- `losses`: minibatches, and their losses by teacher forcing
- `finetuning`: experts from data, by one or several processes
- `hm3`: a policy that builds layer paths, and learns which paths are good
- `mergopt`: an optimizer for experts that are to be merged, and optimizers that it is compared with
- `reduction`: reduces the gradient of one merged tensor to one number for each of its coefficients
"""
