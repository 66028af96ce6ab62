"""Two ranks, each with folders and settings of its own: prints what they say of one another, a line for each case.

``FOLDER FOLDER``: the data set that each rank sees where they differ.
"""

import sys

import torch.distributed as dist

from pretrain.agreement import require_agreement
from pretrain.config_file import load_config
from pretrain.datasets import facts_of, load_datasets
from pretrain.errors import SharedError
from pretrain.resume import go_on_with_data
from pretrain.state import TrainState
from tests.launch import REPOSITORY

MIXED = "data.datasets=[{{manifest: {0}, name: a, weight: {2}}}, {{manifest: {1}, name: b}}]"


def main() -> None:
    dist.init_process_group("gloo")
    global_rank = dist.get_rank()
    common, own = sys.argv[1], sys.argv[1 + global_rank]

    def begin(*settings: str, step: int = 0, locked: bool = True) -> None:
        config = load_config(
            REPOSITORY / "configs/demo.yaml", ["model.sequence_length=32", "run.dir=run", *map(str, settings)]
        )
        datasets, state = load_datasets(config.data), TrainState(step=step)
        go_on_with_data(config, datasets, state, None)
        try:
            require_agreement(config, facts_of(datasets), state, locked)
            print("agreed")
        except SharedError as error:
            print(error)

    same = f"data.manifest={common}"
    begin(same)
    begin(same, locked=global_rank == 0)
    begin(same, step=3 * global_rank)
    begin(f"data.manifest={own}")
    begin("data.manifest=null", MIXED.format(common, own, 1))
    begin("data.manifest=null", MIXED.format(*sys.argv[1:3], 1 + global_rank))
    begin(same, f"train.seed={5 + global_rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
