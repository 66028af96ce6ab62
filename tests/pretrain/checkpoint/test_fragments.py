import itertools
import math

import pytest
import torch

from pretrain.checkpoint.fragments import boxes


@pytest.mark.parametrize("shape", [(7,), (3, 5), (4, 1), (1, 6), (2, 3, 4)])
def test_boxes_cover_exactly_the_range(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).reshape(shape)
    for start, end in itertools.combinations(range(numel + 1), 2):
        pieces = []
        for box in boxes(shape, start, end):
            index = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
            piece = whole[index].flatten()
            assert piece[0] == box.start
            pieces.append(piece)
        assert torch.cat(pieces).tolist() == list(range(start, end))
        assert len(pieces) <= 2 * len(shape) - 1


def test_an_empty_range_has_no_box() -> None:
    assert boxes((3, 4), 5, 5) == []
