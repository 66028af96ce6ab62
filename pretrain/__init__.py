"""Distributed pretraining: configuration, data, engine, checkpoints, monitoring and the training loop."""

import logging
import warnings

# Megatron-core and DeepSpeed warn about kernels that are not used here and of interfaces that they will have to change;
# the first import would be too late to say so.
for _message in (
    ".*(Transformer Engine|Apex).* not installed",
    "full scope is deprecated",
    "`load_state_dict` is deprecated",
    r"`torch\.distributed\.\w+` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)

# torch built for CUDA says so on every machine without a GPU that has a CUDA compiler.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
