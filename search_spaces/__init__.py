"""What may be searched and measured: parameters, search spaces, recipes, study files, objectives, budgets.

Import names from their modules. Nothing is imported here, so that `recipe` costs nobody pydantic and numpy.
"""
