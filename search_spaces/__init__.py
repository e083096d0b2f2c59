"""Search spaces, merge methods, objectives and study files; the package does not import torch, Ray or vLLM.

- `recipe`: the description of one merged model, the interface between search spaces and all other code
- `merge`: one merge of a recipe, and its canonical form
- `parameters`: searched dimensions, their conditions, and configurations
- `spaces`: search spaces, which turn a configuration into a recipe
- `methods`: declarations of the merge methods: sources, coefficients, searched ranges
- `searchers`: the searchers that a study file can name
- `directions`: direction (the experts' shares of the task vectors) and scale of a merge of the whole model
- `baselines`: the recipes that every search is compared with
- `study`: the study file
- `section`: the base class of every section of a study file
- `objectives`: objectives, costs, Pareto fronts, hypervolume
- `costs`: the numbers of layers and parameters of a merge, from its recipe
- `constraints`: bounds on the values of objectives
- `preferences`: preference vectors: the importance of each objective
- `fidelity`: rungs and brackets of successive halving
- `errors`: the errors of this package

Import names from their modules: nothing is imported here, so that `recipe` needs neither pydantic nor NumPy.
"""
