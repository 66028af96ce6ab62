"""All ranks begin with the same checkpoint, data and mixture, or none begins."""

import hashlib
from dataclasses import asdict, dataclass

import torch.distributed as dist

from pretrain.config import Config
from pretrain.data.manifest import canonical_json
from pretrain.datasets import Facts
from pretrain.errors import SharedError
from pretrain.rampup import batch_sizes
from pretrain.state import TrainState


@dataclass(frozen=True)
class Beginning:
    """What a rank found before the process groups started.

    Attributes:
        locked: whether the run folder is ours alone; asked by one rank, True on all others.
        step: of the newest checkpoint.
        datasets: fingerprint of each data set by its name.
        mixture: hash over the seed, the consumed samples and the state of the data: which samples come next.
    """

    locked: bool
    step: int
    datasets: dict[str, str]
    mixture: str

    @classmethod
    def of(cls, config: Config, facts: Facts, state: TrainState, locked: bool) -> "Beginning":
        """This rank's."""
        upcoming = [config.train.seed, batch_sizes(config.train), state.consumed_samples, asdict(state.data)]
        return cls(
            locked=locked,
            step=state.step,
            datasets=facts.fingerprints,
            mixture=hashlib.sha256(canonical_json(upcoming)).hexdigest(),
        )


def require_agreement(config: Config, facts: Facts, state: TrainState, locked: bool) -> None:
    """Go on only if the run folder is ours and all ranks found the same in it and in their data; collective.

    Raises:
        SharedError: another run holds the folder, or a node sees another checkpoint, data set or mixture.
    """
    here = Beginning.of(config, facts, state, locked)
    found: list[Beginning] = [here] * dist.get_world_size()
    dist.all_gather_object(found, here)
    if not all(one.locked for one in found):
        raise SharedError(f"run.dir={config.run.dir} is in use by another run; stop it or choose another run.dir")
    lowest, highest = min(one.step for one in found), max(one.step for one in found)
    if lowest != highest:
        raise SharedError(
            f"run.dir={config.run.dir}: ranks found checkpoints of different steps ({lowest} and {highest}); "
            f"put run.dir on a file system that all nodes share"
        )
    first = found[0]
    for global_rank, one in enumerate(found):
        for name, expected in first.datasets.items():
            if (seen := one.datasets.get(name, "missing")) != expected:
                raise SharedError(
                    f"data set {name} is {expected[:12]} on global rank 0 and {seen[:12]} on global rank "
                    f"{global_rank}; give all nodes the same files"
                )
        if one.mixture != first.mixture:
            raise SharedError(
                f"the mixture or the place in it is {first.mixture[:12]} on global rank 0 and {one.mixture[:12]} on "
                f"global rank {global_rank}; start all nodes with the same settings of data and train"
            )
