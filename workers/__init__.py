"""What runs beside the models: merging, engines, evaluation. Nothing here knows the service.

- `types`: plain data between the service and scoring replicas; imports nothing heavy
- `errors`: what can go wrong, by what the caller does next
- `cache`: small results about files, kept between runs
- `models`: checkpoints on disk and on the hub: opened, checked, fingerprinted
- `merging`: from a recipe to merged tensors
- `evaluation`: tasks, prompts and scores, with lm-eval
- `engines`: what computes with merged weights: vLLM, and transformers to check it
- `mergekit`: mergekit's configurations, read and written
- `export`: merged models as directories
- `serving`: replicas of engines behind Ray Serve, and a fake one
- `tiny_family`: a base and three experts small enough for tests and the demo
"""
