"""Data that a small model learns, and the same with garbage in the samples of some steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pretrain.data.manifest import Manifest
from pretrain.data.order import SampleOrder
from tests.pretrain.data.small import layout, write_set
from tools.sharding.megatron import GivenVocabulary

LENGTH = 32
VOCABULARY = GivenVocabulary(vocab_size=200, eod_id=0)
SEED = 1234  # of the demo's configuration


def language(tokens: int, seed: int) -> npt.NDArray[np.int64]:
    """Each token mostly follows from the one before."""
    generator = np.random.default_rng(seed)
    successor = np.random.default_rng(0).permutation(VOCABULARY.vocab_size)
    found = generator.integers(1, VOCABULARY.vocab_size, tokens)
    for place in np.flatnonzero(generator.random(tokens) < 0.8):
        found[place] = successor[found[place - 1]]
    return found


def build(folder: Path, samples: int, poisoned: Sequence[int] = ()) -> Manifest:
    """A data set; the samples of the global draws ``poisoned`` hold random tokens that are rare elsewhere."""
    tokens = {
        split: language(count * LENGTH + 1, seed=len(split))
        for split, count in (("train", samples), ("validation", 64))
    }
    if len(poisoned):
        generator = np.random.default_rng(3)
        order = SampleOrder(_shard_sizes(samples), SEED, "")
        for sample in order.sample_ids(np.array(poisoned)):
            tokens["train"][sample * LENGTH + 1 : (sample + 1) * LENGTH + 1] = generator.integers(1, 20, LENGTH)
    return write_set(folder, "poisoned" if len(poisoned) else "clean", VOCABULARY, layout(), tokens)


def _shard_sizes(samples: int) -> list[int]:
    """As the writer cuts them."""
    shape = layout()
    whole, rest = divmod(samples, shape.samples_per_member * shape.members_per_shard)
    return [shape.samples_per_member * shape.members_per_shard] * whole + ([rest] if rest else [])
