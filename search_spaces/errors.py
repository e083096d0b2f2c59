"""Errors in the description of a search; each class says what the caller does next.

    SearchSpaceError
    ├── InvalidStudy        (ValueError)  reject the study; has every problem found, not only the first
    ├── InvalidConfiguration(ValueError)  reject this configuration; the study continues
    ├── InvalidRecipe       (ValueError)  reject this recipe
    └── InvalidPreference   (ValueError)  reject these preference weights

Every message says what is wrong, the value seen, what would be accepted, and where.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InvalidConfiguration", "InvalidPreference", "InvalidRecipe", "InvalidStudy", "Problem", "SearchSpaceError"]


class SearchSpaceError(Exception):
    """The base class of the errors of the package `search_spaces`."""


@dataclass(frozen=True)
class Problem:
    """One problem of a study: a message, and the field of the study file that has the problem.

    `field` is the field's dotted path, such as "objectives.1.metric".
    """

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidStudy(SearchSpaceError, ValueError):
    """Raised if a study cannot be run as written.

    `problems` has all problems that were found, in the order of the study file.
    """

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class InvalidConfiguration(SearchSpaceError, ValueError):
    """Raised if a configuration is outside its search space."""


class InvalidRecipe(SearchSpaceError, ValueError):
    """Raised if a recipe is malformed or names something that does not exist."""


class InvalidPreference(SearchSpaceError, ValueError):
    """Raised if weights of the objectives (a preference vector) are not valid."""
