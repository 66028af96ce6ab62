"""Distributed pretraining: configuration, data, engine, checkpoints, monitoring and the training loop."""

import warnings

# Megatron-core warns once per module about kernels and interfaces that are not used here; the first import is too late.
for _message in (".*(Transformer Engine|Apex).* not installed.*", "full scope is deprecated.*", "`load_state_dict`"):
    warnings.filterwarnings("ignore", message=_message, module="megatron")
