import pytest
import torch

from megatron_ext.norms import NORMS
from tests.megatron_ext import small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_carry_the_mark_of_sequence_parallelism(name: str, sequence_parallel: bool) -> None:
    config = small.config(small.settings(), torch.bfloat16)
    config.sequence_parallel = sequence_parallel
    norm = NORMS[name](config, 32, eps=1e-5)
    for parameter in norm.parameters():
        assert parameter.sequence_parallel is sequence_parallel
        assert parameter.dtype == torch.bfloat16
