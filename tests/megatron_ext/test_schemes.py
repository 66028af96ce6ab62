import dataclasses

import pytest

from megatron_ext import SCHEMES, ResidualSettings, residual_block_spec
from megatron_ext.norms import NORMS
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("normalization", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_has_as_many_parameters_as_its_scheme_says(name: str, normalization: str) -> None:
    model = small.settings(name, normalization=normalization)
    stage = small.build(model, device="meta")
    layer = stage.decoder.layers[0]
    sublayers = [*layer.self_attention.parameters(), *layer.mlp.parameters()]
    rest = sum(p.numel() for p in layer.parameters()) - sum(p.numel() for p in sublayers)
    assert SCHEMES[name].parameters(stage.config) == rest


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_a_frozen_description(name: str) -> None:
    scheme = SCHEMES[name]
    assert scheme.name == name
    assert "arXiv" in scheme.source
    assert scheme.flops(2000) == 2 * scheme.flops(1000) > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme.name = "other"


def test_the_block_has_this_stages_layers_and_a_final_norm() -> None:
    config = small.config(small.settings())
    block = residual_block_spec(config, ResidualSettings())
    assert len(block.layer_specs) == config.num_layers
    assert block.layer_norm is NORMS["RMSNorm"]


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown residual scheme 'postnorm'; known: geonorm, pre_norm"):
        residual_block_spec(small.config(small.settings()), ResidualSettings(scheme="postnorm"))
