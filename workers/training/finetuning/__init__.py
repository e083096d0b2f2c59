"""Fine-tuning of one expert: from a specification and data to a checkpoint, on any number of ranks.

- `spec`: the specification file as validated models; imports nothing heavy
- `fleet`: one file for several experts, one per task, and the study that merges them
- `modality`: interface for fine-tuning the models of one modality, which text models and image classifiers implement
- `text`: fine-tuning of text models
- `images`: fine-tuning of image classifiers
- `document_attention`: attention that stays within each document of a packed row
- `data`: tokenized documents, packed into rows of one length, with a mark for each token whose loss is included
- `methods`: the optimizers by name
- `sharding`: shards of the weights, the gradients and the optimizer's state on each rank
- `target_loss`: the loss over target tokens, with few logits in memory at once
- `memory_plan`: the memory of a training on each worker, from the headers of the base model's files
- `models`: the model that is trained: all weights, some layers, or LoRA
- `trainer`: the loop over steps, the same on one rank and on several
- `history`: the file with the losses and other numbers of every update and evaluation
- `checkpoints`: the state of a training on disk, which is either complete or absent
- `evaluation`: scores the tasks of studies during training
- `task_vectors`: the distribution of a trained expert's task vector
- `merge_losses`: the losses of merges of trained experts
- `image_merge_losses`: the losses of merges of trained image experts
- `result`: the trained model as a directory, with a model card
"""
