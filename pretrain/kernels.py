"""Which kernels a run computes with: settled before it starts, and written into its configuration."""

import dataclasses

import torch

from megatron_ext.kernels import resolve
from pretrain.config import Config
from pretrain.errors import UserError


def with_kernels(config: Config, *, loud: bool) -> Config:
    """The configuration with the kernels that `model.kernels` comes to on this machine.

    A checkpoint then records them, and a resumed run that computes by others says so.

    Args:
        config: as set.
        loud: print a warning if something else is used than was wished for.

    Raises:
        UserError: they cannot run here.
    """
    try:
        name, reason = resolve(config.model.kernels, "cuda" if torch.cuda.is_available() else "cpu")
    except ValueError as error:
        raise UserError(f"model.{error}") from None
    if reason and loud:
        print(f"warning: model.{reason}", flush=True)
    return config.model_copy(update={"model": dataclasses.replace(config.model, kernels=name)})
