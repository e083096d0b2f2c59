"""Training on references: how the loss on right answers changes with the coefficients of a merge.

- `gradients`: the losses of a recipe on a minibatch, and their derivatives by its coefficients
- `model`: a transformers model that merges are written into
- `losses`: minibatches, and their losses by teacher forcing
- `reduction`: from the gradient of one merged tensor to one number for each of its coefficients
"""
