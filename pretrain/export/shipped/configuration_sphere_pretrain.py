"""Configuration of a decoder-only transformer with one of twelve residual schemes."""

from typing import Any

from transformers import PretrainedConfig


class SpherePretrainConfig(PretrainedConfig):  # type: ignore[misc]
    """What :class:`SpherePretrainForCausalLM` is built from.

    Args:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: layers, of two sublayers each.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads.
        max_position_embeddings: tokens of a training sequence; rows of the position table where there is one.
        activation: ``swiglu``, ``gelu`` or ``gelu_tanh``.
        normalization: ``rmsnorm`` or ``layernorm``, wherever the scheme has a norm.
        norm_epsilon: of the norms.
        positions: ``rope``, ``learned`` or ``none``.
        rope_base: base of the rotary wavelengths.
        qk_norm: norm each head's queries and keys.
        linear_bias: biases on the linear layers of attention and MLP.
        output_bias: a bias on the output layer.
        scheme: how a sublayer's output joins the stream.
        power: p of the retraction p arctan(beta / p); None is the exponential map.
        decay: of the step size over depth: ``harmonic``, ``sqrt``, ``linear`` or ``none``.
        step_index: what the decay counts: ``layer`` or ``sublayer``.
        alpha: step size before the decay; where it is learned, its value at the start of the training.
        learn_alpha: a learned step size for each sublayer.
        angle_scale: factor of the angle; where it is learned, its value at the start of the training.
        learn_angle_scale: a learned factor for each sublayer.
        clamp: largest angle of a step in radians; None for none.
        radius: norm of the states on the sphere, ``learned``, or None for sqrt(hidden_size).
        final_norm: ``rmsnorm``, ``layernorm``, ``dyt`` or ``none``, before the output layer.
        embedding_scale: a learned factor on the embedding.
    """

    model_type = "sphere_pretrain"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 768,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int = 12,
        max_position_embeddings: int = 1024,
        activation: str = "swiglu",
        normalization: str = "rmsnorm",
        norm_epsilon: float = 1e-5,
        positions: str = "rope",
        rope_base: float = 10000.0,
        qk_norm: bool = False,
        linear_bias: bool = False,
        output_bias: bool = False,
        scheme: str = "geonorm",
        power: float | None = None,
        decay: str = "none",
        step_index: str = "layer",
        alpha: float = 1.0,
        learn_alpha: bool = False,
        angle_scale: float = 1.0,
        learn_angle_scale: bool = False,
        clamp: float | None = None,
        radius: float | str | None = None,
        final_norm: str = "rmsnorm",
        embedding_scale: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.activation = activation
        self.normalization = normalization
        self.norm_epsilon = norm_epsilon
        self.positions = positions
        self.rope_base = rope_base
        self.qk_norm = qk_norm
        self.linear_bias = linear_bias
        self.output_bias = output_bias
        self.scheme = scheme
        self.power = power
        self.decay = decay
        self.step_index = step_index
        self.alpha = alpha
        self.learn_alpha = learn_alpha
        self.angle_scale = angle_scale
        self.learn_angle_scale = learn_angle_scale
        self.clamp = clamp
        self.radius = radius
        self.final_norm = final_norm
        self.embedding_scale = embedding_scale
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        kwargs.pop("head_dim", None)  # saved, but always computed
        super().__init__(**kwargs)
