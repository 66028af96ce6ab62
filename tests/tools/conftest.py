from tests.pretrain.data.conftest import manifest, own_copy

__all__ = ["manifest", "own_copy"]
