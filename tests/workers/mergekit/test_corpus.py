"""Files as users of mergekit write them, through both programs: results agree, and a refusal has a reason.

Written after the documentation of each feature. Models are tiny Qwen2 models in float32, dense and mixtures; mergekit
has our random masks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.errors import InvalidRecipe
from service.merges.merge import MergePlan, check_merge, merge_file
from service.merges.series import check_merges, merge_all
from tests.builders import lora_adapter, tiny_family, tiny_llama, tiny_qwen2, with_tokens
from tests.layouts import layout_family
from tests.workers.mergekit.masks import draw_our_masks, keys_of_task_vectors
from tests.workers.merging.test_stacked_experts import stacked
from workers.errors import InvalidModel
from workers.merging.masks import keep_each
from workers.models.vocabulary import token_ids

PAIR = "models: [{model: math, parameters: {weight: 0.6}}, {model: text, parameters: {weight: 0.3}}]\n"
BASED = PAIR + "base_model: base\n"
DENSE = """
models:
  - {model: base}
  - {model: math, parameters: {weight: 0.5, density: 0.6}}
  - {model: text, parameters: {weight: [0.2, 0.7], density: [0.9, 0.4]}}
base_model: base
"""
PLAIN = "models: [{model: math}, {model: text}]\n"
THREE = "models: [{model: base}, {model: math}, {model: text}]\n"
MIXTURE = """
models:
  - {model: moe/base}
  - {model: moe/math, parameters: {weight: 0.6}}
  - {model: moe/text, parameters: {weight: 0.3}}
base_model: moe/base
experts: stacked
"""


def stack(*ranges: tuple[str, int, int], **more: Any) -> str:
    """YAML of a passthrough merge of slices."""
    slices = [{"sources": [{"model": model, "layer_range": [start, stop]}]} for model, start, stop in ranges]
    return yaml.safe_dump({"slices": slices, "merge_method": "passthrough", **more})


CORPUS = {
    # Averages.
    "linear": PAIR + "merge_method: linear\ndtype: bfloat16\nout_dtype: float32\n",
    "linear, the base counts": "merge_method: linear\nparameters: {weight: 1}\n" + THREE,
    "linear, sum": PAIR + "merge_method: linear\nparameters: {normalize: false}\n",
    "linear, difference": (
        "models: [{model: math, parameters: {weight: 1}}, {model: text, parameters: {weight: -1}}]\n"
        "merge_method: linear\nparameters: {normalize: false}\n"
    ),
    "linear, gradient": (
        "models: [{model: math, parameters: {weight: [0, 0.5, 1]}}, {model: text, parameters: {weight: [1, .5, 0]}}]\n"
        "merge_method: linear\n"
    ),
    "linear, slices": """
        slices:
          - sources:
              - {model: math, layer_range: [0, 2], parameters: {weight: 0.7}}
              - {model: text, layer_range: [1, 3], parameters: {weight: 0.2}}
          - sources:
              - {model: math, layer_range: [2, 3], parameters: {weight: 0.4}}
              - {model: text, layer_range: [0, 1], parameters: {weight: {value: 0.9}}}
        merge_method: linear
        """,
    "slerp": "merge_method: slerp\nbase_model: math\nparameters: {t: 0.4}\n" + PLAIN,
    "slerp, curves": """
        slices:
          - sources: [{model: math, layer_range: [0, 3]}, {model: text, layer_range: [0, 3]}]
        merge_method: slerp
        base_model: math
        parameters:
          t:
            - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
            - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
            - {filter: modelnorm, value: 0.1}
            - value: 0.5
        dtype: float32
        """,
    "slerp, an embedding curve": (
        "merge_method: slerp\nbase_model: text\nembed_slerp: true\n"
        "parameters: {t: [{filter: embed_tokens, value: 0}, {filter: lm_head, value: 1}, {value: 0.5}]}\n" + PLAIN
    ),
    "nuslerp": PAIR + "merge_method: nuslerp\n",
    "nuslerp, task vectors": BASED + "merge_method: nuslerp\n",
    "nuslerp, rows": BASED + "merge_method: nuslerp\nparameters: {nuslerp_flatten: false}\n",
    "nuslerp, columns": (
        BASED + "merge_method: nuslerp\nparameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n"
    ),
    "multislerp, not divided": BASED + "merge_method: multislerp\nparameters: {normalize_weights: false}\n",
    "karcher": "merge_method: karcher\nparameters: {max_iter: 20, tol: 1.0e-7}\n" + THREE,
    "model_stock": "merge_method: model_stock\nbase_model: base\n" + PLAIN,
    "model_stock, weights": BASED + "merge_method: model_stock\nparameters: {normalize: true, int8_mask: true}\n",
    "model_stock, rows": "merge_method: model_stock\nbase_model: base\nparameters: {filter_wise: true}\n" + PLAIN,
    "nearswap": "merge_method: nearswap\nbase_model: math\nparameters: {t: 0.005}\n" + PLAIN,
    "arcee_fusion": "merge_method: arcee_fusion\nbase_model: math\nparameters: {weight: 0.5}\n" + PLAIN,
    # Task vectors.
    "task_arithmetic": BASED + "merge_method: task_arithmetic\nparameters: {lambda: 0.8, normalize: true}\n",
    "task_arithmetic, opposite": (
        "models: [{model: math, parameters: {weight: 1}}, {model: text, parameters: {weight: -1}}]\n"
        "base_model: base\nmerge_method: task_arithmetic\nparameters: {normalize: true}\n"
    ),
    "task_arithmetic, nothing to add": ("models: [{model: base}]\nbase_model: base\nmerge_method: task_arithmetic\n"),
    "task_arithmetic, a file with every key": (
        "name: mine\nchat_template: auto\ntokenizer_source: base\nout_dtype: float32\n"
        "parameters: {int_space: 3, rescale: true}\nmerge_method: task_arithmetic\n" + BASED
    ),
    "ties": DENSE + "merge_method: ties\nparameters: {normalize: true, int8_mask: true}\n",
    "ties, misspelled": DENSE + "merge_method: ties\nparameters: {lamda: 0.5, normalise: false}\n",
    "ties, given twice": DENSE + "merge_method: linear\nmerge_method: ties\n",
    "ties, nothing kept": BASED + "merge_method: ties\nparameters: {density: 0}\n",
    "ties, nothing kept of one": DENSE.replace("density: 0.6", "density: 0") + "merge_method: ties\n",
    "ties, rescaled": DENSE + "merge_method: ties\nparameters: {rescale: true, lambda: 1.2}\n",
    "ties, the base's parameters": DENSE.replace("base}", "base, parameters: {weight: 1}}", 1) + "merge_method: ties\n",
    "ties, other layers": """
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - {model: math, layer_range: [1, 3], parameters: {weight: 0.5, density: 0.5}}
          - sources:
              - {model: base, layer_range: [2, 3]}
              - {model: text, layer_range: [0, 1], parameters: {weight: 0.5, density: 0.5}}
        merge_method: ties
        base_model: base
        """,
    "ties, modules": "modules:\n  default:\n    models: [{model: math}, {model: text}]\n"
    "base_model: base\nmerge_method: ties\nparameters: {weight: 1.0, density: 0.5}\n",
    "ties, parameters of a module": "modules:\n  default:\n    models: [{model: math}, {model: text}]\n"
    "    parameters: {weight: [], density: [{filter: mlp, value: []}, {filter: norm, value: 0.9}], lambda: 0.8}\n"
    "base_model: base\nmerge_method: ties\nparameters: {weight: 0.6, density: 0.4, lambda: 0.1}\n",
    "dare_ties, all kept": BASED + "merge_method: dare_ties\nparameters: {density: 1}\n",
    "dare_linear, nothing kept": BASED + "merge_method: dare_linear\nparameters: {density: 0.0, rescale: false}\n",
    "della, all kept": BASED + "merge_method: della\nparameters: {density: 1, epsilon: 0.1, lambda: 1.1}\n",
    "dare_linear, half kept": DENSE + "merge_method: dare_linear\n",
    "dare_linear, not rescaled": DENSE + "merge_method: dare_linear\nparameters: {rescale: false, lambda: 0.7}\n",
    "dare_ties, half kept": DENSE + "merge_method: dare_ties\nparameters: {normalize: true}\n",
    "dare_ties, little kept": BASED + "merge_method: dare_ties\nparameters: {density: [0.05, 0.2]}\n",
    "della, half kept": DENSE.replace("0.9, 0.4", "0.8, 0.4")
    + "merge_method: della\nparameters: {epsilon: 0.1, lambda: 1.1}\n",
    "della, one probability": DENSE + "merge_method: della\nparameters: {epsilon: 0, normalize: false}\n",
    "della, not rescaled": BASED + "merge_method: della\nparameters: {density: 0.3, rescale: false}\n",
    "della_linear, half kept": BASED + "merge_method: della_linear\nparameters: {density: [0.5, 0.7]}\n",
    "della_linear, nothing kept": BASED + "merge_method: della_linear\nparameters: {density: 0}\n",
    "breadcrumbs": DENSE + "merge_method: breadcrumbs\nparameters: {gamma: 0.05}\n",
    "breadcrumbs, less than one element of a norm": (
        BASED + "merge_method: breadcrumbs\nparameters: {density: 0.02, gamma: [0, 0.01, 0.05]}\n"
    ),
    "breadcrumbs_ties, less than one element of a norm": (
        BASED + "merge_method: breadcrumbs_ties\nparameters: {density: 0.01}\n"
    ),
    "breadcrumbs, too much": DENSE + "merge_method: breadcrumbs\nparameters: {gamma: 0.5}\n",
    "breadcrumbs_ties": DENSE + "merge_method: breadcrumbs_ties\nparameters: {gamma: 0.02, normalize: yes}\n",
    "breadcrumbs_ties, rescaled": DENSE + "merge_method: breadcrumbs_ties\nparameters: {rescale: true}\n",
    "sce": "merge_method: sce\nbase_model: base\nparameters: {select_topk: 0.4}\n" + PLAIN,
    "sce, weights": BASED + "merge_method: sce\nparameters: {select_topk: 1.5, normalize: true}\n",
    "ram": "merge_method: ram\nbase_model: base\n" + PLAIN,
    "ramplus_tl": "merge_method: ramplus_tl\nbase_model: base\nparameters: {r: 0.2, alpha: 0.3}\n" + PLAIN,
    "a base for a slice": """
        slices:
          - sources: [{model: base, layer_range: [0, 1]}, {model: math, layer_range: [0, 1]}]
          - sources: [{model: text, layer_range: [1, 3]}, {model: math, layer_range: [1, 3]}]
            base_model: text
            residual_weight: 0.5
        merge_method: task_arithmetic
        base_model: base
        parameters: {weight: 0.3}
        """,
    # Layers.
    "one model": stack(("math", 0, 3)),
    "layers again": stack(("math", 0, 2), ("math", 1, 3)),
    "layers of two": stack(("math", 0, 2), ("text", 1, 3), dtype="float32"),
    "layers of another depth": stack(("math", 0, 3), ("deep", 2, 5)),
    "layers of another depth, first": stack(("deep", 0, 4), ("math", 1, 3), base_model="deep"),
    "scaled": """
        slices:
          - sources: [{model: math, layer_range: [0, 3]}]
          - sources:
              - model: text
                layer_range: [1, 2]
                parameters: {scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: 0}, {value: 1}]}
        merge_method: passthrough
        """,
    "ranges in quotes": """
        slices:
          - sources: [{model: math, layer_range: ["0", "3"], revision: main}]
        merge_method: passthrough
        parameters:
        """,
    "no layers, first": stack(("text", 0, 0), ("math", 0, 3)),
    "no layers, last": stack(("math", 1, 3), ("text", 2, 2)),
    "no layers, between": stack(("math", 0, 2), ("text", 9, 9), ("math", 2, 3)),
    "averaged, of another depth": """
        slices:
          - sources:
              - {model: math, layer_range: [0, 3], parameters: {weight: 0.5}}
              - {model: deep, layer_range: [2, 5], parameters: {weight: 0.5}}
        merge_method: linear
        """,
    # Adapters.
    "an adapter": "models: [{model: base+lora}]\nmerge_method: passthrough\n",
    "an adapter, as the base": "models: [{model: math, parameters: {weight: 0.5}}]\nbase_model: base+lora\n"
    "merge_method: task_arithmetic\n",
    "an adapter beside its base": "models: [{model: base, parameters: {weight: 0.4}}, "
    "{model: base+lora, parameters: {weight: 0.6}}]\nmerge_method: linear\n",
    "an adapter beside its base, slerp": (
        "models: [{model: base}, {model: base+lora}]\nbase_model: base\nmerge_method: slerp\nparameters: {t: 0.5}\n"
    ),
    "an adapter to an expert": "models: [{model: math+lora_math, parameters: {weight: 0.5, density: 0.5}}, "
    "{model: text, parameters: {weight: 0.5, density: 0.7}}]\nbase_model: base\nmerge_method: ties\n",
    "adapters to two models": "models: [{model: base+lora}, {model: math+lora_math}]\nmerge_method: karcher\n",
    "adapters, in parts": "models: [{model: {model: {path: base}, lora: {path: lora}}}, {model: text}]\n"
    "base_model: {model: base, lora: lora}\nmerge_method: nuslerp\nparameters: {weight: 1}\n".replace(
        "{model: text}]", "{model: text}, {model: math}]"
    ),
    # Vocabularies: tool has two tokens more than base, code two, of which one is the same.
    "tokens of the base": "models: [{model: base}, {model: tool}]\nparameters: {weight: 0.5}\n"
    "merge_method: linear\nbase_model: base\ntokenizer_source: base\n",
    "tokens of another": "models: [{model: math}, {model: tool}]\nparameters: {weight: 0.5}\n"
    "merge_method: linear\nbase_model: math\ntokenizer_source: tool\n",
    "tokens of all": "models: [{model: math}, {model: tool}]\nparameters: {weight: 0.5}\n"
    "merge_method: task_arithmetic\nbase_model: base\ntokenizer: {source: union}\n",
    "tokens of a model that is not merged": PAIR + "merge_method: linear\nbase_model: math\ntokenizer_source: tuned\n",
    "padded": PAIR + "merge_method: linear\nbase_model: math\ntokenizer: {source: base, pad_to_multiple_of: 100}\n",
    "single tokens": """
        models: [{model: base, parameters: {weight: 0.5}}, {model: tool, parameters: {weight: 0.5}}]
        merge_method: linear
        base_model: base
        tokenizer:
          source: union
          tokens:
            <tool>: {source: tool, force: true}
            <call>: {source: {kind: model_token, model: base, token: a}}
            <new>: {source: {kind: model_token, model: tool, token_id: 70}}
            <zero>: {source: {kind: zero}}
            b: {source: {kind: model_token, model: tool, token: c}, force: true}
        """,
    "a token without a source": """
        models: [{model: math, parameters: {weight: 0.5}}, {model: text, parameters: {weight: 0.5}}]
        merge_method: linear
        tokenizer: {source: base, tokens: {a: {}, b: {source: null, force: false}}}
        """,
    # All experts of a layer as one tensor.
    "mixture, ties": MIXTURE + "merge_method: ties\nparameters: {density: 0.4}\n",
    "mixture, breadcrumbs": MIXTURE + "merge_method: breadcrumbs\nparameters: {density: 0.4, gamma: 0.03}\n",
    "mixture, dare_ties": MIXTURE + "merge_method: dare_ties\nparameters: {density: 0.4}\n",
    "mixture, della, one probability": MIXTURE + "merge_method: della\nparameters: {density: 0.4, epsilon: 0}\n",
    "mixture, sce": MIXTURE + "merge_method: sce\nparameters: {select_topk: 0.3}\n",
    "mixture, model_stock": MIXTURE + "merge_method: model_stock\n",
    "mixture, nuslerp": MIXTURE + "merge_method: nuslerp\n",
    "mixture, task_arithmetic": MIXTURE + "merge_method: task_arithmetic\n",
    # Keys and models.
    "a revision of a directory": "models: [{model: math@main, parameters: {weight: 1}}]\nmerge_method: linear\n",
    "a revision, in parts": "models: [{model: {model: {path: math, revision: main}}}]\nmerge_method: passthrough\n",
    "another architecture": "models: [{model: {model: math, override_architecture: Qwen2ForCausalLM}}]\n"
    "merge_method: passthrough\n",
    "empty parameters": "models: [{model: math, parameters: {}}, {model: text, parameters: }]\nmerge_method: linear\n"
    "parameters: {weight: 0.5, normalize: []}\n",
    "text for numbers": PLAIN + "merge_method: linear\nparameters: {weight: '1e-1', normalize: 'true'}\n",
    "flags as letters": PAIR + "merge_method: linear\nparameters: {normalize: n}\n",
    "flags in quotes": PAIR + "merge_method: linear\nparameters: {normalize: '1'}\nout_dtype: ''\n",
    "JSON": json.dumps({"models": [{"model": "math"}], "merge_method": "passthrough"}),
    # As model cards have them.
    "card: a tower of layers": """
        # every second block twice
        dtype: float16
        merge_method: passthrough
        slices:
        - sources:
          - layer_range: [0, 2]
            model: math
        - sources:
          - layer_range: [1, 2]
            model: text
        - sources:
          - layer_range: [1, 3]
            model: math
        - sources:
          - layer_range: [2, 3]
            model: text
        """,
    "card: repeated layers with weaker attention": """
        slices:
          - sources: [{model: math, layer_range: [0, 2]}]
          - sources:
              - model: math
                layer_range: [1, 2]
                parameters: &weaker
                  scale:
                    - {filter: q_proj, value: 0.8408964153}
                    - {filter: k_proj, value: 0.8408964153}
                    - {value: 1.0}
          - sources: [{model: text, layer_range: [1, 3], parameters: *weaker}]
        merge_method: passthrough
        dtype: bfloat16
        """,
    "card: slerp, one curve for both": """
        slices:
          - sources: [{model: math, layer_range: [0, 3]}, {model: text, layer_range: [0, 3]}]
        merge_method: slerp
        base_model: math
        parameters:
          t:
            - {filter: self_attn, value: &curve [0, 0.25, 0.75, 1]}
            - {filter: mlp, value: *curve}
            - {filter: layernorm, value: 0}
            - value: 0.4   # the rest
        """,
    "card: shared keys": """
        models:
          - {model: math, parameters: &shared {weight: 0.5, density: 0.7}}
          - {model: text, parameters: {<<: *shared, weight: 0.25}}
        base_model: base
        merge_method: breadcrumbs_ties
        parameters: {gamma: 0.01, normalize: true, int8_mask: true}
        """,
    "card: dare_ties, parameters at every level": """
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - {model: math, layer_range: [0, 2], parameters: {weight: 0.6, density: 1}}
              - {model: text, layer_range: [0, 2]}
            parameters: {weight: 0.2}
          - sources:
              - {model: base, layer_range: [2, 3]}
              - {model: math, layer_range: [2, 3]}
              - {model: text, layer_range: [2, 3], parameters: {weight: [0.1, 0.9]}}
        merge_method: dare_ties
        base_model: base
        parameters: {weight: 0.4, density: 1.0, normalize: true, int8_mask: true, lambda: 0.9}
        dtype: bfloat16
        """,
    "card: ties, curves within filters": """
        models:
          - model: math
            parameters:
              weight: [{filter: mlp, value: [0, 0.3, 1]}, {filter: o_proj, value: 0.2}, {value: 0.5}]
              density: [1, 0.7, 0.1]
          - model: text
            parameters:
              weight: {value: 0.4}
              density: [{filter: self_attn, value: 0.33}, {value: [0.2, 0.8]}]
        merge_method: ties
        base_model: base
        parameters: {normalize: true}
        """,
    "card: model_stock of three and the base": """
        models: [{model: math}, {model: text}, {model: tuned}, {model: base}]
        merge_method: model_stock
        base_model: base
        tokenizer_source: base
        chat_template: auto
        """,
    "card: nuslerp, curves": """
        slices:
          - sources:
              - {model: math, layer_range: [0, 3], parameters: {weight: [0.9, 0.5, 0.1]}}
              - {model: text, layer_range: [0, 3], parameters: {weight: [0.1, 0.5, 0.9]}}
        merge_method: nuslerp
        out_dtype: float32
        """,
    "card: della_linear, all kept": (
        BASED
        + "merge_method: della_linear\nparameters: {density: 1, epsilon: 0.05, lambda: [0.6, 1.2], normalize: 1}\n"
    ),
    "card: sce by filter": """
        models: [{model: math}, {model: text}, {model: base+lora}]
        merge_method: sce
        base_model: base
        parameters: {select_topk: [{filter: mlp, value: 0.3}, {value: 0.6}]}
        """,
    "card: adapters to one base": """
        models: [{model: base+lora, parameters: {weight: 0.8}}, {model: math, parameters: {weight: [0.2, 0.4]}}]
        merge_method: task_arithmetic
        base_model: base
        chat_template: chatml
        tokenizer_source: base
        dtype: bfloat16
        """,
    "card: arcee_fusion of slices": """
        slices:
          - sources: [{model: math, layer_range: [0, 1]}, {model: text, layer_range: [0, 1]}]
          - sources: [{model: math, layer_range: [1, 3]}, {model: text, layer_range: [1, 3]}]
        merge_method: arcee_fusion
        base_model: math
        """,
    "card: breadcrumbs, curves": DENSE
    + """
merge_method: breadcrumbs
parameters:
  gamma: [{filter: mlp, value: [0.01, 0.1]}, {value: 0.03}]
  lambda: 0.8
""",
    "card: forgetting": (
        "models: [{model: math, parameters: {weight: 1.3}}, {model: text, parameters: {weight: [-0.4, 0]}}]\n"
        "merge_method: task_arithmetic\nbase_model: base\nparameters: {normalize: false, lambda: 0.7}\n"
    ),
    "card: layers chosen by zeros": (
        "models: [{model: math, parameters: {weight: [1, 1, 0]}}, {model: text, parameters: {weight: [0, 0, 1]}}]\n"
        "merge_method: linear\ntokenizer_source: base\nbase_model: math\n"
    ),
    "card: keys that no program reads": (
        "license: apache-2.0\ntags: [merge]\nmodel_name: mine\nrandom_seed: 0\nembed_slerp: true\n"
        "merge_method: karcher\nparameters: {t: 0.5, weight: 1}\ndtype: bfloat16\n" + THREE
    ),
    # Refused by both.
    "card: slices without the base": """
        slices:
          - sources: [{model: math, layer_range: [0, 3]}, {model: text, layer_range: [0, 3]}]
        merge_method: dare_ties
        base_model: base
        parameters: {weight: 0.4, density: 1.0}
        """,
    "linear, nothing to divide by": (
        "models: [{model: math, parameters: {weight: 1}}, {model: text, parameters: {weight: -1}}]\n"
        "merge_method: linear\n"
    ),
    "no weights": PLAIN + "merge_method: linear\n",
    "slerp of three": "merge_method: slerp\nbase_model: base\nparameters: {t: 0.5}\n" + PLAIN,
    "della, wide": BASED + "merge_method: della\nparameters: {density: 0.9, epsilon: 0.2}\n",
    "no base": PAIR + "merge_method: ties\n",
    "listed twice": "models: [{model: math}, {model: math}]\nmerge_method: karcher\n",
    "depths that differ": "models: [{model: math}, {model: deep}]\nmerge_method: karcher\n",
    "no value": "models: [{model: math, parameters: {weight: }}]\nmerge_method: linear\n",
    "a new token without a source": (
        PAIR + "merge_method: linear\ntokenizer: {source: base, tokens: {<new>: {}, <tool>: {force: false}}}\n"
    ),
    "a token without a source, forced": (
        PAIR + "merge_method: linear\ntokenizer: {source: base, tokens: {a: {force: true}}}\n"
    ),
    "a tokenizer that is not there": PAIR + "merge_method: linear\ntokenizer_source: what\n",
}

# Files that neither program merges, with the reason.
REFUSED = {
    "card: slices without the base": "base is not among the sources of slices.0; add it, with its layer_range",
    "linear, nothing to divide by": "sum to zero; they must not, as they are divided by their sum",
    "no weights": "parameters.weight: is missing",
    "slerp of three": "slerp has 3 sources; it takes 2",
    "della, wide": "density + epsilon must be in [0, 1]",
    "no base": "base_model: is missing; ties needs it",
    "listed twice": "math is listed twice",
    "depths that differ": "the models have 3 and 5 layers",
    "no value": "nothing is not accepted; give a number",
    "a new token without a source": "tokenizer.tokens.<new>.source: is missing, and math has no such token; give a ",
    "a token without a source, forced": "tokenizer.tokens.a.source: is missing; give a model, kind: zero",
    "a tokenizer that is not there": "tokenizer_source: what: neither a directory nor a hub model",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory: models base, math, text and deep, adapters lora (of base) and lora_math (of math)."""
    place = tmp_path_factory.mktemp("models")
    tiny_family(place, build=tiny_qwen2, experts=("math", "text"), hidden=32)
    tiny_qwen2(place / "deep", 7, layers=5, hidden=32)
    lora_adapter(place / "base", place / "lora", 1)
    lora_adapter(place / "math", place / "lora_math", 2, use_rslora=True)
    with_tokens(place / "base", place / "tool", "<tool>", "<call>", seed=3)
    with_tokens(place / "base", place / "code", "<code>", "<tool>", seed=4)
    with_tokens(place / "base", place / "tuned", seed=5)
    layout_family(place / "moe", "qwen2_moe")  # mergekit merges no mixtures with dense layers
    before = Path.cwd()
    os.chdir(place)
    yield place
    os.chdir(before)


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def by_mergekit(text: str, out: Path) -> dict[str, torch.Tensor] | None:
    """Tensors by mergekit for a configuration; None if it refuses the file, or if its result is not finite.

    Tensors that mergekit writes before it fails at a configuration of another depth count.
    """
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    document: dict[str, Any] = yaml.safe_load(text) | {"dtype": "float32", "out_dtype": "float32"}
    cache = str(out.parent / "adapters")
    options = MergeOptions(device="cpu", lora_merge_cache=cache, write_model_card=False, quiet=True)
    try:
        run_merge(MergeConfiguration.model_validate(document), str(out), options)
    except Exception:
        if not any(out.glob("*.safetensors")):
            return None
    found = loaded(out)
    return found if all(bool(tensor.isfinite().all()) for tensor in found.values()) else None


def by_us(text: str, out: Path, warnings: list[str]) -> dict[str, torch.Tensor]:
    file = out.parent / "merge.yml"
    file.write_text(text)
    return loaded(merge_file(file, {}, out, dtype="float32", note=warnings.append))


def compare(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], num_tokens: int | None = None
) -> None:
    assert mine.keys() == theirs.keys() - ({"lm_head.weight"} - mine.keys())  # mergekit writes a tied head, too
    for name, whole in mine.items():
        # With a tokenizer, mergekit drops rows that stand for no token.
        tensor, other = (
            each[:num_tokens] if "embed" in name and num_tokens else each for each in (whole, theirs[name])
        )
        torch.testing.assert_close(tensor, other, rtol=1e-6, atol=2e-6, msg=(name + ": {}").format)


def mask_keys(out: Path, models: str) -> dict[bytes, int]:
    """The keys of the masks of a merge of experts in the directory `models`."""
    fingerprints = json.loads((out / "recipe.json").read_text())["models"]
    base = stacked(loaded(Path(models) / "base"))
    keys: dict[bytes, int] = {}
    for alias in ("math", "text"):
        if alias in fingerprints:
            keys |= keys_of_task_vectors(base, stacked(loaded(Path(models) / alias)), fingerprints[alias])
    return keys


# Where random masks are drawn.
RANDOM = {
    name
    for name, text in CORPUS.items()
    if re.search(r"dare|della", text) and not re.search(r"all kept|della_linear, nothing kept|every level", name)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_corpus_merges_as_mergekit_does(home: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that mergekit merges gives the same tensors here."""
    text = CORPUS[name]
    if name in REFUSED:
        assert by_mergekit(text, tmp_path / "theirs") is None
        with pytest.raises((InvalidRecipe, InvalidModel)) as caught:
            by_us(text, tmp_path / "ours", [])
        assert REFUSED[name] in str(caught.value)
        assert not (tmp_path / "ours").exists()
        return
    mine = by_us(text, tmp_path / "ours", [])
    keys = mask_keys(tmp_path / "ours", "moe" if text.startswith(MIXTURE) else ".")
    drawn = draw_our_masks(monkeypatch, keys)
    theirs = by_mergekit(text, tmp_path / "theirs")
    assert theirs is not None, "mergekit refuses it"
    assert bool(drawn) == (name in RANDOM)
    if text.startswith(MIXTURE):
        mine, theirs = stacked(mine), {tensor: theirs[tensor] for tensor in stacked(mine)}
    ids = token_ids(tmp_path / "theirs")
    compare(mine, theirs, len(ids) if ids and "tokenizer" in text else None)
    assert ids is None or token_ids(tmp_path / "ours") == ids
    if "pad_to_multiple_of" in text:
        rows = [tensors["model.embed_tokens.weight"] for tensors in (mine, theirs)]
        assert {len(each) for each in rows} == {400}
        # Those that are added to the models' 384 rows are the mean of the tokens' rows.
        torch.testing.assert_close(rows[0][384:], rows[1][384:], rtol=1e-6, atol=2e-6)


# What is more than tensors.


def test_what_has_no_effect_in_a_file_is_warned_of(home: Path, tmp_path: Path) -> None:
    for name, expected in {
        "slerp, curves": ["parameters.t.2.filter: 'modelnorm' has no effect: it is in no tensor's name; did you mean "],
        "slerp, an embedding curve": ["embed_slerp: true has no effect: unknown key; known keys: merge_method, "],
        "model_stock, weights": [f"models.{i}.parameters.weight: 0.{6 - 3 * i} has no effect: " for i in (0, 1)],
        "task_arithmetic, a file with every key": ["parameters.int_space: 3 has no effect: task_arithmetic takes no "],
        "ties, misspelled": [
            'parameters.lamda: 0.5 has no effect: ties takes no such parameter; did you mean "lambda"? ',
            'parameters.normalise: false has no effect: ties takes no such parameter; did you mean "normalize"? ',
        ],
        "ties, the base's parameters": ["models.0.parameters.weight: 1 has no effect: base is the base"],
        "ranges in quotes": ["slices.0.sources.0.revision: 'main' has no effect: write the revision with the "],
        "a revision of a directory": ["math@main: the revision has no effect: math is a directory"],
        "another architecture": ["models.0.model.override_architecture: 'Qwen2ForCausalLM' has no effect: the arch"],
        "linear": [],
        "ties": [],
    }.items():
        file = tmp_path / "merge.yml"
        file.write_text(CORPUS[name])
        plan = check_merge(file, {}, tmp_path / "out")
        found = [warning.removeprefix(f"{file}: ") for warning in plan.warnings if "normalize: true" not in warning]
        assert len(found) == len(expected), name
        assert all(map(str.startswith, found, expected)), (name, found)
        assert all(warning in plan.to_text() for warning in plan.warnings)


def test_vocabulary_models_are_named(home: Path, tmp_path: Path) -> None:
    """Models that only the vocabulary needs are named by their place."""
    for tokenizer, message in {
        "tokenizer_source: what": "tokenizer_source: what: neither a directory nor a hub model",
        "tokenizer: {source: what}": "tokenizer.source: what: neither a directory nor a hub model",
        "tokenizer: {source: base, tokens: {a: {source: what}}}": "tokenizer.tokens.a.source: what: neither",
    }.items():
        with pytest.raises(InvalidModel) as caught:
            by_us(f"{PAIR}merge_method: linear\n{tokenizer}\n", tmp_path / "out", [])
        assert str(caught.value).startswith(message)
        assert len(caught.value.problems) == 1
    merged = PAIR.replace("model: text", "model: what")
    with pytest.raises(InvalidModel, match="expert 'what': what: neither a directory nor a hub model"):
        by_us(f"{merged}merge_method: linear\ntokenizer_source: what\n", tmp_path / "out", [])


def test_absent_models_tokens_are_refused(home: Path, tmp_path: Path) -> None:
    """A recipe whose tokens come from an absent model is refused."""
    text = PAIR + "merge_method: linear\ntokenizer: {source: base, tokens: {a: {source: text}}}\n"
    by_us(text, tmp_path / "out", [])
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    recipe["vocabulary"]["tokens"]["a"]["model"] = "other"
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe))
    with pytest.raises((InvalidRecipe, InvalidModel), match="other"):
        check_merge(file, {name: home / name for name in ("math", "text")}, tmp_path / "again")


def test_adapter_merge_is_repeatable(home: Path, tmp_path: Path) -> None:
    """A merge with adapters is repeatable from its recipe and from its configuration."""
    mine = by_us(CORPUS["an adapter to an expert"], tmp_path / "out", [])
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    named = {alias: Path("math+lora_math" if alias == "lora_math" else alias) for alias in recipe["models"]}
    again = loaded(merge_file(tmp_path / "out" / "recipe.json", named, tmp_path / "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in mine.items())
    by_us(CORPUS["adapters to two models"], tmp_path / "both", [])
    document = yaml.safe_load((tmp_path / "both" / "mergekit_config.yml").read_text())
    assert sorted(source["model"] for source in document["slices"][0]["sources"]) == [
        f"{home / 'base'}+{home / 'lora'}",
        f"{home / 'math'}+{home / 'lora_math'}",
    ]


SERIES = """
name: first
models: [{model: math, parameters: {weight: 0.5}}, {model: text, parameters: {weight: 0.5}}]
merge_method: linear
---
models: [{model: first}, {model: second+lora, parameters: {weight: 0.7, density: 0.5}}]
merge_method: ties
base_model: base
parameters: {weight: 0.5}
---
name: second
models: [{model: first}]
base_model: text
merge_method: slerp
parameters: {t: 0.3}
"""


def test_several_documents_are_merged_one_after_another(home: Path, tmp_path: Path) -> None:
    from mergekit.options import MergeOptions
    from mergekit.scripts.multimerge import load_config, make_tasks

    file, out = tmp_path / "merge.yml", tmp_path / "out"
    file.write_text(SERIES)
    plans = check_merges(file, {}, out)
    assert list(plans) == ["first", "second", ""]
    assert isinstance(plans["first"], MergePlan)
    assert (plans["second"], plans[""]) == (("first",), ("first", "second"))
    merge_all(file, {}, out, note=lambda _: None)
    place = str(tmp_path / "theirs")
    configurations, needed = load_config(SERIES, place)
    options = MergeOptions(device="cpu", lora_merge_cache=place, write_model_card=False, quiet=True)
    for task in make_tasks(configurations, needed, options, place, str(tmp_path / "their-out"), False)[::-1]:
        for name in ("first", "second"):
            task.input_merges.data.get(name) and task.input_merges[name].execute()
        task.execute()
    compare(loaded(out), loaded(tmp_path / "their-out"))
    again = merge_all(file, {}, out, note=lambda _: None)  # what is there is left as it is
    assert again == out
    for text, message in {
        SERIES.replace("name: second", "name: first"): "document 1: name: first is given twice",
        SERIES.replace(
            "model: math", "model: second"
        ): "the merges first, (without a name), second are made from each other",
        SERIES.replace("name: second\n", ""): "the final merge is not clear: documents without a name, or that no oth",
        SERIES.replace("ties", "tie"): "document 2: merge_method: 'tie' is not supported; did you mean",
        SERIES.replace("name: first", "name: ../first"): "document 1: name: '../first' is not accepted",
    }.items():
        file.write_text(text)
        with pytest.raises(InvalidRecipe, match=r"merge\.yml: ") as caught:
            merge_all(file, {}, tmp_path / "none")
        assert message in str(caught.value)
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("choice", "part"), [("chatml", "<|im_start|>"), ("llama3", "<|eot_id|>"), ("'{{ messages[0].content }}'", "[0]")]
)
def test_a_chat_template_is_written_and_made_again(home: Path, tmp_path: Path, choice: str, part: str) -> None:
    by_us(CORPUS["one model"] + f"chat_template: {choice}\n", tmp_path / "out", [])
    assert part in (tmp_path / "out" / "chat_template.jinja").read_text()
    merge_file(tmp_path / "out" / "recipe.json", {"math": home / "math"}, tmp_path / "again")
    assert part in (tmp_path / "again" / "chat_template.jinja").read_text()


def test_most_common_chat_template(home: Path, tmp_path: Path) -> None:
    """The most common chat template is used, and template files are read."""
    for name, template in {"math": "{{ 'A' }}", "text": "{{ 'B' }}", "base": "{{ 'B' }}"}.items():
        shutil.copytree(home / name, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(template)
    (tmp_path / "mine.jinja").write_text("{{ 'C' }}")
    for choice, expected in (("auto", "{{ 'B' }}"), ("mine.jinja", "{{ 'C' }}")):
        out = tmp_path / f"out-{choice}"
        by_us(CORPUS["ties, modules"] + f"chat_template: {choice}\n", out, [])
        assert (out / "chat_template.jinja").read_text() == expected
    with pytest.raises(InvalidRecipe, match="chat_template: 'chatmml' is neither a name, nor a file, nor a template"):
        by_us(CORPUS["one model"] + "chat_template: chatmml\n", tmp_path / "no", [])


def test_an_adapter_with_tokens_of_its_own_keeps_their_rows(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", tied=False, vocab_size=100)
    wizard = with_tokens(base, tmp_path / "wizard", "<spell>")
    adapter, spare = tmp_path / "adapter", tmp_path / "spare"
    trained = lora_adapter(wizard, adapter, modules_to_save=["embed_tokens", "lm_head"]).merge_and_unload()
    lora_adapter(base, spare)
    for place in (adapter, spare):  # the spare one has the tokenizer, and no rows of its own
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(wizard / name, place / name)
    ids = token_ids(wizard)
    assert ids is not None
    expected = trained.get_input_embeddings().weight[ids["<spell>"]]
    text = f"models: [{{model: {base}+ADAPTER, parameters: {{weight: 1}}}}]\nmerge_method: task_arithmetic\n"
    text += f"base_model: {base}\n"
    for source, rows, message in (
        ("", 101, "the adapter has rows for tokens of its own: '<spell>'; the merge has the union of all tokens; "),
        ("tokenizer_source: base\n", 100, ""),
    ):
        notes: list[str] = []
        out = tmp_path / f"out-{rows}"
        found = by_us(text.replace("ADAPTER", str(adapter)) + source, out, notes)["model.embed_tokens.weight"]
        assert len(found) == rows
        assert ("<spell>" in (token_ids(out) or {})) == (rows == 101)
        assert message in "".join(notes)
        assert bool(notes) == bool(message)
        if message:
            torch.testing.assert_close(found[ids["<spell>"]], expected, rtol=1e-6, atol=2e-6)
    for source, rows, where in (("", 100, "they are left out"), (f"tokenizer_source: {base}+{spare}\n", 101, "zeros")):
        notes = []
        out = tmp_path / f"spare-{rows}"
        found = by_us(text.replace("ADAPTER", str(spare)) + source, out, notes)["model.embed_tokens.weight"]
        assert len(found) == rows > max((token_ids(out) or {}).values())
        assert "its tokenizer has tokens without a row of their own: '<spell>'; " in notes[0]
        assert where in notes[0]


@pytest.mark.slow
def test_deviation_rows_without_a_token(home: Path, tmp_path: Path) -> None:
    """The angle between embeddings counts rows without a token; mergekit's does not."""
    text = "models: [{model: base}, {model: math}]\nbase_model: base\nmerge_method: slerp\nparameters: {t: 0.4}\n"
    text += "tokenizer_source: base\n"
    theirs = by_mergekit(text, tmp_path / "theirs")
    mine = by_us(text, tmp_path / "mine", [])
    assert theirs is not None
    name = "model.embed_tokens.weight"
    first, second = (loaded(home / model)[name].double() for model in ("base", "math"))
    num_tokens = len(theirs[name])
    assert num_tokens < len(first) == len(mine[name])

    def merged(num_rows: int) -> torch.Tensor:
        """SLERP of both embeddings, by the angle between their first `num_rows` rows."""
        angle = torch.arccos(torch.cosine_similarity(first[:num_rows].flatten(), second[:num_rows].flatten(), dim=0))
        found = torch.sin(0.6 * angle) * first + torch.sin(0.4 * angle) * second
        return (found / torch.sin(angle)).float()

    torch.testing.assert_close(mine[name], merged(len(first)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs[name], merged(num_tokens)[:num_tokens], rtol=1e-6, atol=1e-6)
    assert (merged(len(first)) - merged(num_tokens)).abs().max() > 1e-5


@pytest.mark.slow
def test_deviation_della_of_stacked_experts(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DELLA of stacked experts ranks within rows; mergekit ranks within columns."""
    text = "models: [{model: moe/math, parameters: {weight: 0.6, density: 0.4}}]\nbase_model: moe/base\n"
    text += "merge_method: della_linear\nparameters: {epsilon: 0.3, rescale: false}\nexperts: stacked\n"
    mine = stacked(by_us(text, tmp_path / "mine", []))
    keys = mask_keys(tmp_path / "mine", "moe")
    draw_our_masks(monkeypatch, keys)
    theirs = by_mergekit(text, tmp_path / "theirs")
    assert theirs is not None
    name = "model.layers.0.mlp.experts.gate_up_proj"
    base, expert = (stacked(loaded(home / "moe" / model))[name] for model in ("base", "math"))
    tau = expert - base

    def merged(dim: int) -> torch.Tensor:
        """The merged tensor by DELLA, with ranks of magnitudes along the dimension `dim`."""
        ranks = tau.abs().argsort(dim=dim).argsort(dim=dim).double()
        kept = keep_each(keys[tau.numpy().tobytes()], 0.1 + 0.6 * ranks / (tau.shape[dim] - 1))
        return base + 0.6 * tau * kept

    torch.testing.assert_close(mine[name], merged(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs[name], merged(1), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(merged(1), merged(-1))
    for tensor in (each for each in mine if mine[each].dim() < 3):
        torch.testing.assert_close(mine[tensor], theirs[tensor], rtol=1e-6, atol=2e-6)


def test_models_of_other_depths_make_a_model_that_loads(home: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    by_us(CORPUS["layers of another depth, first"], tmp_path / "out", [])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == len(model.model.layers) == len(model.config.layer_types) == 6
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) - len(REFUSED) >= 60
    assert REFUSED.keys() <= CORPUS.keys()
