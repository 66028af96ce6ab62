"""How modules that Megatron-core builds learn which kernels to use."""

from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.kernels import Choice


@dataclass
class KernelConfig(TransformerConfig):  # type: ignore[misc]
    """Megatron-core's configuration of a model, and `ModelSettings.kernels`."""

    kernels: Choice = "auto"


def choice_in(config: TransformerConfig) -> Choice:
    """`auto` for a configuration of Megatron-core's own class."""
    choice: Choice = getattr(config, "kernels", "auto")
    return choice
