"""Weights alone: saved in four processes, read in one; and checkpoints that lie."""

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from pretrain.checkpoint.contents import _PlainUnpickler
from pretrain.checkpoint.weights import count_parameters, load_weights
from pretrain.errors import UserError
from pretrain.inspect_checkpoint import load_model, read
from tests.launch import launch
from tests.pretrain import tiny
from tests.pretrain.checkpoint.small import flip_a_byte, forge_contents, forge_tensors, reseal
from tests.pretrain.inspect_worker import CASES, config_of, rows

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("single_process")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    launch("tests.pretrain.inspect_worker", 4, str(folder), *CASES)
    return folder


def checkpoint_of(saved: Path, case: str) -> Path:
    return saved / case / "step-00000001"


def load(saved: Path, case: str) -> Any:
    return load_model(config_of(case), checkpoint_of(saved, case), tiny.VOCAB, torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_one_process_computes_the_loss_of_the_engine_that_saved(saved: Path, case: str) -> None:
    module = load(saved, case)
    expected = torch.load(saved / "losses.pt")[case]
    # bf16 sums in another order in another layout.
    assert read(module, rows(), 2).loss == pytest.approx(expected, rel=2e-3 if case == "bf16" else 1e-6)
    assert count_parameters(checkpoint_of(saved, case)) == sum(p.numel() for p in module.parameters()) - padding(module)


def padding(module: Any) -> int:
    vocabulary = [p for name, p in module.named_parameters() if name.startswith(("embedding.word", "output_layer."))]
    for parameter in vocabulary:
        assert not parameter[tiny.VOCAB :].any()
    return sum(p[tiny.VOCAB :].numel() for p in vocabulary)


def test_the_loss_needs_the_checkpoint(saved: Path) -> None:
    """Guards the test above: weights that were never loaded give another loss."""
    other = load_model(config_of("peri_ln"), checkpoint_of(saved, "peri_ln"), tiny.VOCAB, torch.device("cpu"))
    with torch.no_grad():
        next(other.parameters())[5] += 0.1
    assert read(other, rows(), 2).loss != pytest.approx(torch.load(saved / "losses.pt")["peri_ln"], rel=1e-6)


def test_another_model_is_refused(saved: Path) -> None:
    module = load(saved, "peri_ln")
    with pytest.raises(UserError, match=r"does not fit its own record: .* is missing instead of"):
        load_weights(module, checkpoint_of(saved, "ngpt_lerp"), tiny.VOCAB)


@pytest.fixture
def forged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_of(saved, "peri_ln"), tmp_path / "step-00000001"))


def test_a_forged_table_of_contents_runs_nothing(forged: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    forge_contents(forged, mark)
    pickle.loads((forged / ".metadata").read_bytes())
    assert mark.exists(), "the attack itself is broken"
    mark.unlink()
    with pytest.raises(UserError, match=r"it names posix.system, which is no part of a checkpoint"):
        count_parameters(forged)
    assert not mark.exists()


class ByGetattr:
    """Pickled as ``getattr(*arguments)``."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self.arguments


def test_a_table_of_contents_from_an_older_python_is_read() -> None:
    contiguous = ByGetattr(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    assert load_plain(contiguous) is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for arguments in ((Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__subclasses__"), (_MEM_FORMAT_ENCODING, "x")):
        with pytest.raises(pickle.UnpicklingError, match=r"it names builtins\.getattr, which is no part"):
            load_plain(ByGetattr(*arguments))


def load_plain(held: Any) -> Any:
    return _PlainUnpickler(io.BytesIO(pickle.dumps(held))).load()


def test_forged_tensors_run_nothing(saved: Path, forged: Path, tmp_path: Path) -> None:
    module, mark = load(saved, "peri_ln"), tmp_path / "mark"
    forge_tensors(forged, mark)
    with pytest.raises(UserError, match=r"is damaged: its tensors cannot be read \(UnpicklingError\)"):
        load_weights(module, forged, tiny.VOCAB)
    assert not mark.exists()


def forge(checkpoint: Path, change: Any) -> None:
    metadata: Metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(checkpoint)


KEY = "fp32.decoder.layers.1.mlp.linear_fc2.weight"


def test_objects_in_place_of_tensors_are_refused(forged: Path) -> None:
    """Torch would unpickle such an object with all it names."""
    forge(forged, lambda metadata: metadata.state_dict_metadata.update({KEY: BytesStorageMetadata()}))
    with pytest.raises(UserError, match="BytesStorageMetadata, which is no part"):
        count_parameters(forged)


def test_files_elsewhere_are_refused(forged: Path) -> None:
    def elsewhere(metadata: Metadata) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../" + place.relative_path

    forge(forged, elsewhere)
    with pytest.raises(UserError, match="lies outside the checkpoint"):
        count_parameters(forged)


def test_a_tensor_with_a_hole_is_refused(forged: Path) -> None:
    forge(forged, lambda metadata: metadata.state_dict_metadata[KEY].chunks.pop())
    with pytest.raises(UserError, match=f"{KEY} is not whole"):
        count_parameters(forged)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_a_broken_table_of_contents_gets_one_line(forged: Path, content: bytes) -> None:
    (forged / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="is damaged or not from this program"):
        count_parameters(forged)


def test_broken_tensors_get_one_line(saved: Path, forged: Path) -> None:
    module = load(saved, "peri_ln")
    (file, *_) = forged.glob("*.distcp")
    flip_a_byte(file)
    with pytest.raises(UserError, match=f"is damaged: {file.name} has the crc32 "):
        load_weights(module, forged, tiny.VOCAB)
    file.write_bytes(b"\0" * file.stat().st_size)
    reseal(forged)
    with pytest.raises(UserError, match="is damaged: its tensors cannot be read"):
        load_weights(module, forged, tiny.VOCAB)
