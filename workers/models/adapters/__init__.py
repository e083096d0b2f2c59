"""LoRA adapters of PEFT, opened as models: the base model's tensors with the adapter's changes.

Everything is read from adapter_config.json and the headers of adapter_model.safetensors. PEFT decides by a model's
modules which tensors an adapter changes; this package builds no modules, and decides by the base's tensors. The package
does not compute the product of an adapter's matrices; the module `computed_tensors` does so when a tensor is read.

- `reading`: applies an adapter to a base, or reports all of its problems
- `settings`: adapter_config.json
- `stored`: the tensors of adapter_model.safetensors, by their use in peft
- `adapted_base`: the base's tensor for each parameter of the adapted model
- `experts`: adapters of the experts of a mixture
"""

from __future__ import annotations

from workers.models.adapters.adapted_base import AdaptedBase
from workers.models.adapters.reading import Adapter, is_adapter, read_adapter, stated_base
from workers.models.adapters.settings import ADAPTER_CONFIG

__all__ = ["ADAPTER_CONFIG", "AdaptedBase", "Adapter", "is_adapter", "read_adapter", "stated_base"]
