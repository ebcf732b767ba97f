# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""ATMA: a hybrid language model with polar attention and a gated-delta memory, for Transformers.

`import atma` is enough for the Auto classes of Transformers to know the model type `"atma"`.
"""

# pytest imports this file a second time under the name of the checkout's folder; the package is
# only ever "atma".
if __name__ == "atma":
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .cache_atma import AtmaCache
    from .configuration_atma import AtmaConfig
    from .modeling_atma import AtmaForCausalLM, AtmaModel, AtmaPreTrainedModel

    AutoConfig.register(AtmaConfig.model_type, AtmaConfig, exist_ok=True)
    AutoModel.register(AtmaConfig, AtmaModel, exist_ok=True)
    AutoModelForCausalLM.register(AtmaConfig, AtmaForCausalLM, exist_ok=True)

    __version__ = "0.1.0"
    __all__ = ["AtmaCache", "AtmaConfig", "AtmaForCausalLM", "AtmaModel", "AtmaPreTrainedModel"]
