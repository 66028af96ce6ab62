"""From the settings to this rank's part of the model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_ext.backends import BACKENDS, Backend
from megatron_ext.head import add_output_bias, cross_entropy_with_z_loss, mask_padding, padded_vocab_size
from megatron_ext.initialize import Initialization, initialize
from megatron_ext.kernels.config import KernelConfig
from megatron_ext.norms import NORM_NAMES
from megatron_ext.schemes import residual_block_spec, scheme_of, with_defaults
from megatron_ext.schemes.scheme import Matrix
from megatron_ext.settings import ModelSettings, ParallelSettings

_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "gelu": {"activation_func": F.gelu, "gated_linear_unit": False},
    "gelu_tanh": {"activation_func": partial(F.gelu, approximate="tanh"), "gated_linear_unit": False},
}
_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
_SHARED_BY_HEADS = (".q_layernorm.", ".k_layernorm.")
# With Megatron-core's defaults two stages would silently mix up their messages.
_INTERLEAVED: dict[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class ResidualGPTModel(GPTModel):  # type: ignore[misc]
    """One pipeline stage of a GPT with a residual scheme, a masked vocabulary padding, output bias and z-loss."""

    embd_group: Any

    def __init__(self, *arguments: Any, true_vocab_size: int, output_bias: bool, z_loss: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.z_loss = z_loss
        if self.position_embedding_type == "rope":
            self.rotary_pos_emb.cp_group = None  # so that it makes the angles of whole samples: see _preprocess
        if self.pre_process and self.embedding.add_position_embedding:
            # Megatron-core makes this one table in torch's default type, which would widen the whole stream.
            self.embedding.position_embeddings.to(self.config.params_dtype)
        if self.post_process:
            if output_bias:
                add_output_bias(self.output_layer, self.config.params_dtype)
            mask_padding(self.output_layer, true_vocab_size)
        mark_partial_gradients(self)

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, *, packed_seq_params: Any = None, **named: Any
    ) -> tuple[Any, ...]:
        """Megatron-core's embedding and rotary angles; with documents the angles too follow `position_ids`.

        So they do where context-parallel ranks hold parts of a sample, at places that are the same for all samples.

        A table over the whole sequence is made as without documents, so that it is the same one for all micro batches.
        """
        states, angles, *rest = super()._preprocess(input_ids, position_ids, **named)
        parts = self.config.context_parallel_size > 1
        if angles is not None and (packed_seq_params is not None or parts):
            rows = position_ids if packed_seq_params is not None else position_ids[:1]
            angles = angles[:, 0][rows.transpose(0, 1)]  # [sequence, batch or 1, 1, head_dim]
        return states, angles, *rest

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross-entropy of every token, [batch, sequence], from logits [sequence, batch, vocabulary / tp]."""
        losses: Tensor
        if not self.z_loss:
            losses = super().compute_language_model_loss(labels, logits)
            return losses
        losses = cross_entropy_with_z_loss(logits, labels.transpose(0, 1).contiguous(), self.z_loss)
        return losses.transpose(0, 1).contiguous()

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the embedding's and output layer's parameters as Megatron-core does, without its exchange of weights.

        Both copies of a tied embedding are equal by the way they are initialised, and nothing can be exchanged while
        the parameters are on the meta device.
        """
        group, self.embd_group = self.embd_group, None
        super().setup_embeddings_and_output_layer()
        self.embd_group = group


def mark_partial_gradients(model: GPTModel) -> None:
    """Say of every parameter whether its gradient must be summed over tp: `parameter.partial_over_tp`.

    True where each tensor-parallel rank holds the whole parameter but applies it to a part of the work: to its own
    tokens under sequence parallelism (Megatron-core's mark `sequence_parallel`), or to its own heads.
    """
    heads_are_divided = model.config.tensor_model_parallel_size > 1
    for name, parameter in model.named_parameters():
        by_tokens = getattr(parameter, "sequence_parallel", False)
        by_heads = heads_are_divided and any(norm in name for norm in _SHARED_BY_HEADS)
        parameter.partial_over_tp = by_tokens or by_heads


def transformer_config(model: ModelSettings, parallel: ParallelSettings, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-core's configuration of the model.

    Its fused kernels stay off: without Transformer Engine or Apex they are absent, or ours stand in their place.

    Raises:
        ValueError: sizes that cannot be divided as asked.
    """
    groups = model.num_query_groups or model.num_attention_heads
    _require_divisible("model.hidden_size", model.hidden_size, "model.num_attention_heads", model.num_attention_heads)
    _require_divisible("model.num_attention_heads", model.num_attention_heads, "model.num_query_groups", groups)
    _require_divisible("model.num_query_groups", groups, "parallel.tp", parallel.tp)
    _require_divisible("model.ffn_hidden_size", model.ffn_hidden_size, "parallel.tp", parallel.tp)
    _require_divisible("model.num_layers", model.num_layers, "parallel.pp * parallel.vpp", parallel.pp * parallel.vpp)
    return KernelConfig(
        kernels=model.kernels,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=groups,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization=NORM_NAMES[model.normalization],
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=model.linear_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        # Parameters are then made by plain torch.empty, so that `with torch.device(...)` decides where they live.
        use_cpu_initialization=True,
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        **(_INTERLEAVED | {"virtual_pipeline_model_parallel_size": parallel.vpp} if parallel.vpp > 1 else {}),
        **_ACTIVATIONS[model.activation],
        **_RECOMPUTE[model.recompute],
    )


def build_model(
    model: ModelSettings,
    parallel: ParallelSettings,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    token_counts: Sequence[int] | None,
    vp_stage: int | None = None,
) -> nn.Module:
    """Build this process's pipeline stage; Megatron-core's parallel_state must be initialised.

    Sequence parallelism, recomputation and dropout also need `model_parallel_cuda_manual_seed` before the first forward
    pass. On the CPU call :func:`megatron_ext.install_cpu_support` first.

    Args:
        model: shape and scheme; `vocab_size` must be set.
        parallel: must be what parallel_state was initialised with.
        dtype: of all parameters and of the residual stream.
        device: where the parameters are made; "meta" makes shapes only.
        seed: of the initial weights, which depend on it and on the parameters' global names alone.
        token_counts: occurrences of each token in the training data, needed by `output_bias: unigram` (except on
            "meta"); tokens beyond them count as never seen.
        vp_stage: with `parallel.vpp` above 1, which of the process's virtual stages, from 0.

    Returns:
        A GPTModel: (tokens [batch, sequence], position_ids [batch, sequence], None, labels=[batch, sequence]) gives the
        loss of every token, fp32 [batch, sequence], on the last stage, else the hidden state. Without labels the last
        stage gives this tensor-parallel rank's logits, [batch, sequence, padded vocabulary / tp]. With
        `packed_seq_params=documents` and `documents.position_ids` (:class:`megatron_ext.Documents`), on every stage,
        each document is a sequence of its own. Under `parallel.cp` tokens, positions and labels are this rank's part
        (:func:`megatron_ext.own_part`), and documents are :class:`megatron_ext.DocumentRuns`.

    Raises:
        ValueError: settings that do not fit together.
    """
    if model.vocab_size is None:
        raise ValueError("model.vocab_size is not set")
    on_meta = torch.device(device).type == "meta"
    unigram = model.output_bias == "unigram"
    if unigram and token_counts is None and not on_meta:
        raise ValueError("model.output_bias is 'unigram': give token_counts, or choose 'learned' or 'none'")
    config = transformer_config(model, parallel, dtype)
    # Shapes are the same in every backend.
    backend = BACKENDS["local" if on_meta else model.backend]
    config.use_cpu_initialization = not backend.makes_on_gpu
    with torch.device(device):
        stage = _stage(model, config, model.vocab_size, vp_stage, backend)
    if not on_meta:
        how = Initialization(
            seed=seed,
            matrix_std=_matrix_std(model, config),
            vocab_size=model.vocab_size,
            token_counts=token_counts if unigram else None,
        )
        initialize(stage, how)
    return stage


def _matrix_std(model: ModelSettings, config: TransformerConfig) -> Callable[[str, tuple[int, ...]], float | Tensor]:
    """Standard deviations of the initial matrices, as the residual scheme wants them."""
    scheme, settings = scheme_of(model.residual), with_defaults(model.residual)
    return lambda name, shape: scheme.initial_std(Matrix(name, shape, model.init_std, config, settings))


def _stage(
    model: ModelSettings, config: TransformerConfig, vocab_size: int, vp_stage: int | None, backend: Backend
) -> ResidualGPTModel:
    """This pipeline stage, with whatever happens to be in its parameters."""
    return ResidualGPTModel(
        config=config,
        transformer_layer_spec=residual_block_spec(config, model.residual, vp_stage=vp_stage, backend=backend),
        vocab_size=padded_vocab_size(vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        vp_stage=vp_stage,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=_POSITIONS[model.positions],
        rotary_base=model.rope_base,
        true_vocab_size=vocab_size,
        output_bias=model.output_bias != "none",
        z_loss=model.z_loss,
    )


def _leave_uninitialised(weight: Tensor) -> Tensor:
    """An `init_method` that draws nothing: the weights are filled by name once the stage stands."""
    return weight


def _require_divisible(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise ValueError(f"{name} is {value}; it must be a multiple of {divisor_name}, which is {divisor}")
