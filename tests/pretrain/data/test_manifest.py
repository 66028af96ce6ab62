import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.files import sha256_of_file
from pretrain.data.manifest import Manifest, load_manifest
from pretrain.errors import UserError


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_a_manifest_is_named_by_its_file_or_its_folder(manifest: Manifest) -> None:
    loaded = load_manifest(str(manifest.directory / "manifest.json"))
    assert loaded.fingerprint == load_manifest(manifest.directory).fingerprint == manifest.fingerprint
    assert loaded.name == "small"
    assert (loaded.sequence_length, loaded.dtype) == (32, "<u2")
    assert loaded.tokenizer_file == manifest.directory / "tokenizer.model"
    assert loaded.tokenizer_sha256 == sha256_of_file(loaded.tokenizer_file)
    assert loaded.token_counts.dtype == np.int64
    assert loaded.token_counts.shape == (loaded.vocab_size,)


def test_the_fingerprint_ignores_white_space_and_sees_every_value(own_copy: Path, manifest: Manifest) -> None:
    edit(own_copy, lambda content: None)
    assert load_manifest(own_copy).fingerprint == manifest.fingerprint
    edit(own_copy, lambda content: content["splits"]["train"]["shards"][1].update(sha256="0" * 64))
    assert load_manifest(own_copy).fingerprint != manifest.fingerprint


def _add_up(content: dict[str, Any]) -> None:
    for split in content["splits"].values():
        split["samples"] = sum(shard["samples"] for shard in split["shards"])


FAULTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda content: content.update(version=1),
        "manifest {path} has format version 1, this program reads 2: build it anew",
    ),
    (lambda content: content.pop("dtype"), "manifest {path} is damaged at dtype: Field required"),
    (
        lambda content: content.update(extra=1),
        "manifest {path} is damaged at extra: Unexpected keyword argument",
    ),
    (
        lambda content: content["splits"]["train"].update(samples=0),
        "manifest {path} is damaged at splits.train.samples: Input should be greater than 0",
    ),
    (
        lambda content: content["splits"]["train"]["shards"].pop(),
        "manifest {path} is damaged: the shards of split 'train' do not add up to its {samples} samples",
    ),
    (
        lambda content: content["splits"]["validation"]["shards"][0].update(file="../other.tar"),
        "manifest {path} is damaged: '../other.tar' is no plain file name",
    ),
    *(
        (
            lambda content, name=name: content["splits"]["train"]["shards"][0].update(file=name),
            f"manifest {{path}} is damaged: {shown} is no plain file name",
        )
        for name, shown in (
            ("/etc/passwd", "'/etc/passwd'"),
            ("file:///etc/passwd", "'file:///etc/passwd'"),
            ("pipe:touch owned", "'pipe:touch owned'"),
            ("a\\b.tar", "'a\\\\b.tar'"),
            ("\ud800.tar", "'\\ud800.tar'"),
            ("a\nb.tar", "'a\\nb.tar'"),
            (f"{300 * 'a'}.tar", f"'{80 * 'a'}...'"),
        )
    ),
    (
        lambda content: content.update(name="\x1b[2J/../x"),
        "manifest {path} is damaged: '\\x1b[2J/../x' is no name of 1 to 40 letters, digits, - or _",
    ),
    (
        lambda content: content["splits"].update(test=content["splits"].pop("validation")),
        "manifest {path} is damaged: its splits are 'train, test', not train or train and validation",
    ),
    (
        lambda content: content["splits"].pop("train"),
        "manifest {path} is damaged: its splits are 'validation', not train or train and validation",
    ),
    (
        lambda content: content["splits"]["train"]["shards"][0].update(bytes=10**30),
        "manifest {path} is damaged at splits.train.shards.0.bytes: Input should be less than or equal to "
        "1125899906842624",
    ),
    (
        lambda content: content["token_counts"].__setitem__(3, 2**63),
        "manifest {path} is damaged at token_counts.3: Input should be less than or equal to 1125899906842624",
    ),
    (
        lambda content: content.update(sequence_length=10**14),
        "manifest {path} is damaged: 48 samples do not fit the 10240 bytes of small-train-000000.tar",
    ),
    (
        lambda content: [content["splits"]["validation"]["shards"][0].update(samples=10**12), _add_up(content)],
        "manifest {path} is damaged: 1000000000000 samples do not fit the 10240 bytes of small-validation-000000.tar",
    ),
    (
        lambda content: content["splits"].update(validation=content["splits"]["train"]),
        "manifest {path} is damaged: a shard is named twice",
    ),
    (
        lambda content: content["token_counts"].pop(),
        "manifest {path} is damaged: token_counts has 599 entries for 600 pieces",
    ),
    (
        lambda content: content.update(eod_id=600),
        "manifest {path} is damaged: eod_id 600 is outside the vocabulary of 600",
    ),
    (
        lambda content: content.update(tokenizer_file="other.model"),
        "tokenizer {folder}/other.model, named in manifest.json, does not exist",
    ),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_a_damaged_manifest_is_refused_in_one_line(
    own_copy: Path, manifest: Manifest, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = edit(own_copy, change)
    with pytest.raises(UserError) as error:
        load_manifest(own_copy)
    assert str(error.value) == message.format(path=path, folder=own_copy, samples=manifest.splits["train"].samples)


def test_files_that_are_no_manifest_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(UserError) as absent:
        load_manifest(tmp_path / "nowhere.json")
    assert str(absent.value) == f"manifest {tmp_path}/nowhere.json does not exist"
    path.write_text('{"version": 1')
    with pytest.raises(UserError) as broken:
        load_manifest(path)
    assert str(broken.value) == f"manifest {path} is no JSON: Expecting ',' delimiter: line 1 column 14 (char 13)"
    path.write_text("[]")
    with pytest.raises(UserError) as other:
        load_manifest(path)
    assert str(other.value) == f"manifest {path} has format version None, this program reads 2: build it anew"
