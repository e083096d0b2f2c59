"""Types of the content of recipe.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

__all__ = ["RecipeDocument"]

Number = Annotated[int, Field(ge=0)]


class MergeDocument(TypedDict):
    method: str
    sources: Annotated[
        list[Annotated[list[Any], Field(min_length=2, max_length=2)]],
        Field(min_length=1, description="[model alias, layer or null], each an operand of the merge."),
    ]
    coefficients: NotRequired[dict[str, float | list[float]]]
    seed: NotRequired[int]
    base: NotRequired[
        Annotated[
            list[Any],
            Field(
                min_length=2, max_length=2, description="[model alias, layer or null]; if absent, the recipe's base."
            ),
        ]
    ]


class LayerDocument(TypedDict):
    attention: MergeDocument
    mlp: MergeDocument
    norm: MergeDocument
    scale: NotRequired[Annotated[float, Field(description="Factor of the residual stream after the layer.")]]
    mlp_scale: NotRequired[Annotated[float, Field(description="Factor of what the layer's MLP adds to the stream.")]]
    alignment: NotRequired[str]


class TokenDocument(TypedDict):
    """Source of a token's row in the merged model's embedding.

    The source is a row of the model with the alias `model`: the row of the token `token`, or of the token with the id
    `id`. If neither is given, the source is the row of the same token. Without `model`, the row consists of zeros. If
    `force` is true, the row is used for all source models; otherwise, it is used only for source models without the
    token.
    """

    model: NotRequired[str]
    token: NotRequired[str]
    id: NotRequired[Number]
    force: NotRequired[bool]


class VocabularyDocument(TypedDict):
    tokens: NotRequired[dict[str, TokenDocument]]
    multiple_of: NotRequired[Annotated[int, Field(ge=1, description="The number of rows is a multiple of this.")]]
    by_id: NotRequired[Annotated[bool, Field(description="Whether a union adds tokens in the order of their ids.")]]


class RecipeDocument(TypedDict):
    """Recipe of a merge, the content of recipe.json."""

    format: Literal["mergesearch-recipe/1", "mergesearch-recipe/2", "mergesearch-recipe/3"]
    models: Annotated[dict[str, str], Field(description="Alias to content fingerprint.")]
    base: str
    embedding: MergeDocument
    layers: list[LayerDocument]
    head: MergeDocument
    tensors: NotRequired[
        Annotated[
            dict[str, MergeDocument],
            Field(description="Single tensors, by name, that are merged differently from their component."),
        ]
    ]
    tokenizer: NotRequired[
        Annotated[
            str,
            Field(
                description='Tokenizer of the merged model: "union", or the alias of a model; if absent, the base\'s.'
            ),
        ]
    ]
    vocabulary: NotRequired[
        Annotated[VocabularyDocument, Field(description="Further options of the merged vocabulary.")]
    ]
    experts: NotRequired[
        Annotated[
            Literal["stacked"],
            Field(description="All experts of a layer are merged as one tensor; if absent, each by itself."),
        ]
    ]
    trim: NotRequired[
        Annotated[
            Literal["model"],
            Field(description="Shares of task vectors are kept of the whole model; if absent, of each tensor."),
        ]
    ]
    dtype: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            Field(description="Dtype of the merged model; if absent, `mergesearch merge` writes bfloat16."),
        ]
    ]
