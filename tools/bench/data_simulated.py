"""A data set of any number of samples that takes little room on disk, for what depends on that number alone.

All samples are equal, and their last two tokens are such that the crc32 is 0. So the shards are links to one tar, and
most of a side index is zeros, which a sparse file does not store.
"""

import hashlib
import io
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from zlib_ng import zlib_ng

from pretrain.data.manifest import MANIFEST_NAME
from pretrain.data.shard_index import index_path
from tools.bench.data_formats import VOCABULARY
from tools.sharding.adopt import Adoption, adopt

# Links that one file may have on ext4.
_LARGEST_LINKS = 60_000


@dataclass(frozen=True)
class Simulation:
    """What is simulated.

    Attributes:
        samples: of the data set, rounded up to whole shards.
        sequence_length: of a sample.
        rows_per_member: samples of a tar's member; it and the next as :mod:`tools.shards` builds by default.
        members_per_shard: of a tar.
    """

    samples: int
    sequence_length: int = 4096
    rows_per_member: int = 128
    members_per_shard: int = 256

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-self.samples // (self.rows_per_member * self.members_per_shard))


def simulate(folder: Path, simulation: Simulation) -> None:
    """Write the data set into a folder that is there; every check of a real one holds for it."""
    if simulation.shards > _LARGEST_LINKS:
        raise ValueError(f"{simulation.shards} shards, {_LARGEST_LINKS} are the most")
    first = folder / _name(0)
    _write_tar(first, simulation)
    adopt(Adoption(folder=folder, out=None, vocabulary=VOCABULARY, name="simulated"))
    manifest = json.loads((folder / MANIFEST_NAME).read_bytes())
    split = manifest["splits"]["train"]
    (shard,) = split["shards"]
    index = index_path(first).read_bytes()
    split["shards"] = [shard, *(_another(folder, number, shard, index) for number in range(1, simulation.shards))]
    for counted in ("documents", "tokens", "samples"):
        split[counted] *= simulation.shards
    manifest["token_counts"] = [simulation.shards * count for count in manifest["token_counts"]]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="ascii")


def row_without_crc(tokens: int) -> npt.NDArray[np.uint16]:
    """A sample, uint16 ``[tokens]``, whose crc32 is 0."""
    body = bytes(2 * tokens - 4)
    # crc32 feeds 4 bytes by xor to its state; 0x6DD90A9D takes the initial state to a crc32 of 0.
    return np.frombuffer(body + (zlib_ng.crc32(body) ^ 0x6DD90A9D).to_bytes(4, "little"), dtype="<u2")


def _write_tar(path: Path, simulation: Simulation) -> None:
    row = row_without_crc(simulation.sequence_length + 1)
    content = io.BytesIO()
    np.save(content, np.broadcast_to(row, (simulation.rows_per_member, len(row))), allow_pickle=False)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(simulation.members_per_shard):
            entry = tarfile.TarInfo(f"{number:06d}.tokens.npy")
            entry.size = content.seek(0, io.SEEK_END)
            content.seek(0)
            tar.addfile(entry, content)


def _another(folder: Path, number: int, shard: dict[str, object], index: bytes) -> dict[str, object]:
    """One more shard: a link to the tar, and an index that differs by its name."""
    tar = folder / _name(number)
    os.link(folder / _name(0), tar)
    own = index.replace(_name(0).encode(), tar.name.encode())
    with index_path(tar).open("wb") as file:
        file.write(own.rstrip(b"\0"))
        file.truncate(len(own))
    return shard | {"file": tar.name, "index_sha256": hashlib.sha256(own).hexdigest()}


def _name(number: int) -> str:
    return f"simulated-{number:06d}.tar"
