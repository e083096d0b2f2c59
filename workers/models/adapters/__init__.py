"""PEFT's LoRA adapters as models: which tensors of its base an adapter changes, and how.

Everything is read from adapter_config.json and the headers of adapter_model.safetensors. What peft decides by the types
of modules is derived from the base's tensors. The product of an adapter's matrices is not computed here.

- `reading`: an adapter applied to a base, or everything that is wrong with it
- `settings`: adapter_config.json
- `stored`: the tensors of adapter_model.safetensors, by what peft uses them for
- `adapted_base`: the base's tensor for each parameter of the adapted model
- `experts`: adapters of the experts of a mixture
"""

from __future__ import annotations

from workers.models.adapters.adapted_base import AdaptedBase
from workers.models.adapters.reading import Adapter, is_adapter, read_adapter, stated_base
from workers.models.adapters.settings import ADAPTER_CONFIG

__all__ = ["ADAPTER_CONFIG", "AdaptedBase", "Adapter", "is_adapter", "read_adapter", "stated_base"]
