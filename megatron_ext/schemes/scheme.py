"""What a residual scheme is: one frozen description."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.norms import LayerNorm, model_norm
from megatron_ext.residual import Residual, Sublayer
from megatron_ext.settings import ResidualSettings

NormChoice = Callable[[TransformerConfig, ResidualSettings], Any]
"""(config, settings) -> a norm's class or ModuleSpec, built with (config=, hidden_size=, eps=); None for no norm."""

OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
"""How the names of the matrices end whose output joins the stream."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix whose initial values are to be drawn.

    Attributes:
        name: global, as in an undivided model.
        shape: of the whole matrix, (output, input).
        std: `ModelSettings.init_std`.
        config: Megatron-core's configuration of the model.
        settings: of the residual, with the scheme's defaults filled in.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    config: TransformerConfig
    settings: ResidualSettings

    @property
    def is_output_projection(self) -> bool:
        """Whether its output joins the residual stream."""
        return self.name.endswith(OUTPUT_PROJECTIONS)


def usual_std(matrix: Matrix) -> float:
    """`init_std`; output projections have it over sqrt(2 num_layers), unless `output_init` is plain (GPT-2)."""
    if matrix.is_output_projection and matrix.settings.output_init != "plain":
        return matrix.std / math.sqrt(2 * matrix.config.num_layers)
    return matrix.std


def no_norm(config: TransformerConfig, settings: ResidualSettings) -> None:
    """The choice of a scheme that has no norm there."""
    return


def usual_norm(config: TransformerConfig, settings: ResidualSettings) -> Any:
    """The model's normalization."""
    return model_norm(config)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One residual scheme.

    Attributes:
        name: the value of `ResidualSettings.scheme`.
        source: where its formula comes from.
        residual: builds the module that joins one sublayer's output to the stream.
        parameters: (config, settings with defaults) -> parameters outside attention, MLP, embedding and output layer.
        flops: (hidden_size) -> forward FLOPs per token of one layer outside attention and MLP, a multiply-add as two.
        defaults: the settings that mean something to it, with their defaults. None as a default stands for what the
            setting's own documentation says.
        required: the settings that have no default.
        attention_norm, mlp_norm: in front of the sublayers.
        final_norm: in front of the output layer.
        entry: builds the module that the embedded tokens pass before the first layer, if there is one.
        initial_std: standard deviation of a matrix's initial values: a number, or [output, 1].
        on_sphere: whether every state has the same norm.
    """

    name: str
    source: str
    residual: Callable[[Sublayer], Residual]
    parameters: Callable[[TransformerConfig, ResidualSettings], int]
    flops: Callable[[int], int]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    attention_norm: NormChoice = no_norm
    mlp_norm: NormChoice = no_norm
    final_norm: NormChoice = usual_norm
    entry: Callable[[TransformerConfig, ResidualSettings], nn.Module | None] | None = None
    initial_std: Callable[[Matrix], float | Tensor] = usual_std
    on_sphere: bool = False

    def with_defaults(self, settings: ResidualSettings) -> ResidualSettings:
        """The settings with this scheme's defaults where nothing was said.

        Raises:
            ValueError: a setting that means nothing to this scheme, or one that is missing; names it.
        """
        said = {
            setting.name: value
            for setting in dataclasses.fields(settings)
            if setting.name != "scheme" and (value := getattr(settings, setting.name)) is not None
        }
        for name, value in said.items():
            if name not in self.defaults and name not in self.required:
                known = ", ".join((*self.required, *self.defaults)) or "none"
                raise ValueError(
                    f"model.residual.{name}={value}: means nothing to the scheme {self.name}; remove it "
                    f"(settings of {self.name}: {known})"
                )
        for name in self.required:
            if name not in said:
                raise ValueError(f"model.residual.{name} is missing: the scheme {self.name} has no default for it")
        return dataclasses.replace(settings, **{**self.defaults, **said})


def norm_parameters(config: TransformerConfig, norm: Any = None) -> int:
    """Parameters of a norm, by default of the model's."""
    return (2 if (norm or model_norm(config)) is LayerNorm else 1) * int(config.hidden_size)
