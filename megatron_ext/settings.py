"""What a user may say about the model: plain frozen dataclasses, read from the configuration or built by hand."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

# Read by pydantic where these classes are part of a larger configuration: an unknown key is an error.
_FORBID_UNKNOWN = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ResidualSettings:
    """How a sublayer's output joins the residual stream.

    None stands for the scheme's own default, which :data:`megatron_ext.schemes.SCHEMES` lists. A setting that a scheme
    does not list means nothing to it, and is refused.

    Attributes:
        scheme: a name in :data:`megatron_ext.schemes.SCHEMES`.
        p: exponent of the retraction p arctan(beta / p), > 0; of the scheme ``p`` alone.
        decay: step-size decay over the global index k (1-based) of a network with T indices: ``harmonic`` 1/k,
            ``sqrt`` 1/sqrt(k), ``linear`` (T - k + 1)/T, ``none`` 1 (GeoNorm, arXiv 2601.22095).
        step_index: what k counts; the papers leave it open.
        alpha: step size before the decay, dimensionless, > 0; where it is learned, its value at the start.
        learn_alpha: one learned step size per sublayer, kept positive by softplus (SpheretNorm, arXiv 2608.02668).
        angle_scale: factor of the angle before the clamp, > 0; where it is learned, its value at the start.
        learn_angle_scale: one learned factor per sublayer, kept positive by softplus (GeoNorm's appendix).
        clamp: largest angle of one step in radians, in (0, pi], or ``none``. The exponential map wraps round beyond pi.
        radius: norm of every state; ``sqrt_hidden`` is sqrt(hidden_size), ``learned`` starts there. The papers leave it
            open.
        save: what the backward pass of a step keeps beside the state: the sublayer's ``output`` becomes the next
            state, which is alive anyway, but shows the update only at bounded angles and constant step sizes; the
            ``update`` always works.
        final_norm: before the output layer; None is the model's normalization.
        output_init: initial attention and MLP output projections: ``scaled`` by 1/sqrt(2 num_layers), or ``plain``.
        dyt_attention_alpha: start of the factor inside tanh in front of attention; of ``pre_dyt`` alone.
        dyt_alpha: the same in front of the MLP and of the output layer.
        dyt_embedding_scale: a learned factor on the embedding, sqrt(hidden_size) at the start; of ``pre_dyt`` alone.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_UNKNOWN

    scheme: str = "geonorm"
    p: float | None = None
    decay: Literal["harmonic", "sqrt", "linear", "none"] | None = None
    step_index: Literal["layer", "sublayer"] | None = None
    alpha: float | None = None
    learn_alpha: bool | None = None
    angle_scale: float | None = None
    learn_angle_scale: bool | None = None
    clamp: float | Literal["none"] | None = None
    radius: float | Literal["sqrt_hidden", "learned"] | None = None
    save: Literal["output", "update"] | None = None
    final_norm: Literal["rmsnorm", "layernorm", "none"] | None = None
    output_init: Literal["scaled", "plain"] | None = None
    dyt_attention_alpha: float | None = None
    dyt_alpha: float | None = None
    dyt_embedding_scale: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Shape of a decoder-only transformer; sizes count elements.

    Attributes:
        num_query_groups: key/value heads; None means one per attention head.
        vocab_size: rows of the embedding before padding; None means the tokenizer's.
        activation: of the MLP; swiglu has a gate, so it takes 2/3 of gelu's ffn_hidden_size for as many parameters.
            ``gelu_tanh`` is gelu's approximation by tanh, as in GPT-2.
        normalization: the norm wherever a scheme has one; norm_epsilon is its epsilon.
        positions: ``rope`` turns queries and keys (RoFormer, arXiv 2104.09864), ``learned`` adds one learned vector per
            position up to sequence_length to the embedding (as GPT-2 does), ``none`` leaves order to the causal mask.
            The learned vectors are a matrix, so they start with init_std and weight decay acts on them.
        rope_base: base of the rotary position embedding's wavelengths; unused unless positions is rope.
        qk_norm: norm every head's queries and keys, before their rotation (QK-norm, arXiv 2010.04245), with the model's
            normalization and one gain for all heads of a layer.
        linear_bias: biases on the linear layers of attention (query/key/value, projection) and MLP (both). They start
            at zero and are never decayed. The output layer has its own setting, output_bias.
        tie_embeddings: one matrix for the embedding and the output layer.
        output_bias: bias of the output layer: ``unigram`` starts at the log token frequencies, ``learned`` at zero.
            Without it a model on the sphere collapses early to the unigram distribution.
        dropout: share of elements set to zero in training, in [0, 1), at GPT-2's three places: the embedding, the
            attention weights, and every sublayer's output before it joins the stream.
        z_loss: adds z_loss * log(Z)^2 to the training objective of every token, Z the sum of its exponentiated logits
            (PaLM, arXiv 2204.02311, takes 1e-4); 0 is off. The reported loss stays the cross-entropy alone.
        backend: of linear layers and attention: ``local`` is Megatron-core's own with torch's kernels, ``te`` NVIDIA's
            Transformer Engine, which must be installed, on GPUs. ``te`` has NOT RUN yet: compare its first losses.
        init_std: standard deviation of the initial weights; residual.output_init scales the output projections'.
        recompute: ``full`` keeps only each layer's input and recomputes the rest in the backward pass; ``selective``
            recomputes the MLPs alone, which keep most. (Elsewhere the word may mean attention, whose large matrices do
            not exist here: arXiv 2205.05198.)
        kernels: implementation of retraction, SwiGLU and, on a CPU, RMSNorm: ``triton`` (NVIDIA's GPUs), ``compiled``
            (torch.compile; on a CPU it needs a C++ compiler, and is ``eager`` with a warning where there is none),
            ``eager`` (torch's operations one by one), or ``auto``: triton on a GPU, else eager. They differ in the
            last digits, so a run is only reproduced bit for bit by the one that it began with. Within layers that
            train.compile compiles whole, the compiler sees the eager ones and fuses them itself.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_UNKNOWN

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    sequence_length: int
    num_query_groups: int | None = None
    vocab_size: int | None = None
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = 1e-5
    positions: Literal["rope", "learned", "none"] = "rope"
    rope_base: float = 10000.0
    qk_norm: bool = False
    linear_bias: bool = False
    tie_embeddings: bool = False
    output_bias: Literal["unigram", "learned", "none"] = "unigram"
    dropout: float = 0.0
    z_loss: float = 0.0
    backend: Literal["local", "te"] = "local"
    init_std: float = 0.02
    recompute: Literal["none", "selective", "full"] = "none"
    kernels: Literal["auto", "eager", "compiled", "triton"] = "auto"
    residual: ResidualSettings = field(default_factory=ResidualSettings)


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Degrees of model parallelism; the data-parallel size is the world size divided by tp * pp * cp.

    Attributes:
        tp: tensor parallel size.
        sp: sequence parallelism over the tensor-parallel group.
        pp: pipeline parallel size.
        vpp: virtual pipeline stages of a rank: it holds so many separate groups of layers, which shortens the wait at
            the ends of a step to 1/vpp for as much more communication (interleaved schedule, arXiv 2104.04473).
        cp: context parallel size: so many ranks share the tokens of each sample, for sequences whose activations do not
            fit one. They gather keys and values, and ZeRO divides over them as over data-parallel ranks.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _FORBID_UNKNOWN

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1

    @property
    def ranks_of_a_replica(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def described(self) -> str:
        """The degrees in words; of the rarer ones those that are above 1."""
        rarer = "".join(f" x {name} {size}" for name, size in (("vpp", self.vpp), ("cp", self.cp)) if size > 1)
        return f"tp {self.tp} x pp {self.pp}{rarer}"
