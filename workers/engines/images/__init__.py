"""The engine for merges of image classifiers: a PyTorch module of transformers whose weights are replaced in place.

- `classifiers`: image encoders, which are classifiers without their heads
- `engine`: `ImageEngine`, which holds one merge at a time and compares itself with transformers
- `pixels`: preprocessed images, cached within a limit of memory
- `scoring`: scores samples of image tasks with the classification heads that the tasks name
- `verification`: scores stored samples again with transformers on an exported merge
"""
