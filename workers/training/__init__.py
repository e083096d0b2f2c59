"""Training: derivatives of losses with respect to a merge's coefficients, and fine-tuning of experts to be merged.

- `gradients`: the losses of a recipe on a minibatch, and their derivatives with respect to its coefficients
- `model`: a transformers model into which merges are written
- `memory`: memory of passes and of derivatives, and a setting with which a process keeps freed memory for its next step
- `losses`: minibatches, and their losses by teacher forcing
- `task_losses`: interface that the losses of each modality (text or images) implement
- `text_losses`: losses of language models on right answers, by teacher forcing
- `image_losses`: losses of image classifiers: cross-entropy of labels, or entropy of predictions
- `finetuning`: training of experts on data, by one or several processes
- `hm3`: a policy that builds layer paths, and learns which paths are good
- `mergopt`: an optimizer for experts that are to be merged, and optimizers that it is compared with
- `reduction`: derivatives with respect to coefficients, from the gradient of one merged tensor
"""
