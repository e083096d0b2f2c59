"""The engine of image classifiers: one module of transformers in torch, over which merges are written in place.

- `classifiers`: encoders without heads, as modules and by the names that files store
- `engine`: `ImageEngine`, which holds a merge and is compared with fresh models of transformers
- `pixels`: preprocessed images, cached within a stated memory
- `scoring`: samples of image tasks, scored with the heads that the tasks name
- `verification`: an export, loaded with plain transformers, compared with stored samples
"""
