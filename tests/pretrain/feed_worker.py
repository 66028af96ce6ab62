"""Two ranks, each with its own copy of a data set: prints what their feeds give, as JSON.

``LAYOUT FOLDER FOLDER``: ``tp2`` or ``dp2``, and the folder of each rank's copy.
"""

import json
import sys
from pathlib import Path

import torch

from pretrain import parallel
from pretrain.config_file import load_config
from pretrain.data.ahead import ReadAhead
from pretrain.data.batches import Source, TrainingBatches
from pretrain.data.order import SampleOrder
from pretrain.data.reader import ShardReader
from pretrain.datasets import load_datasets
from pretrain.errors import SharedError
from pretrain.feed import Feed
from pretrain.launch import read_launch
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.resume import go_on_with_data
from pretrain.state import TrainState
from tests.launch import REPOSITORY

STEPS, LENGTH, GLOBAL_BATCH, LIMIT = 4, 32, 8, 3


def main() -> None:
    layout, launch = sys.argv[1], read_launch()
    folder = Path(sys.argv[2 + launch.global_rank])
    settings = [f"data.manifest={folder}", f"model.sequence_length={LENGTH}", f"train.steps={STEPS}"]
    settings += [f"train.global_batch={GLOBAL_BATCH}", "train.micro_batch=2", "logging.every=2", "checkpoint.every=0"]
    settings += [f"data.max_bad_samples={LIMIT}", f"parallel.tp={2 if layout == 'tp2' else 1}"]
    config = load_config(REPOSITORY / "configs/demo.yaml", settings)
    place = parallel.start(launch, config.parallel, config.train.seed)
    state, datasets = TrainState(), load_datasets(config.data)
    mixture = go_on_with_data(config, datasets, state, None)
    reader = ShardReader(datasets[0].manifest, "train", LENGTH, lambda fault: None)
    source = Source(reader, SampleOrder(reader.shard_sizes, config.train.seed))
    batches = TrainingBatches([source], mixture, 2, GLOBAL_BATCH, place.dp_rank, place.dp_size)
    board = Board(folder / "tensorboard", 0, place.global_rank)
    result = StepResult(0.0, 0.0, 0.0)
    masks, counts, error = [], [], None
    with ReadAhead(batches.read) as ahead:
        feed = Feed(config, batches, ahead, board, place, None)
        for _ in range(STEPS):
            micro_batches = feed.fetch(state)
            masks += [torch.cat([micro.loss_mask for micro in micro_batches]).mean(dim=1).tolist()]
            state.advance(GLOBAL_BATCH, GLOBAL_BATCH * LENGTH, 0.0)
            try:
                feed.after_step(state, result)
            except SharedError as stop:
                error = str(stop)
                break
            counts.append(state.data.bad_samples)
    board.close()
    print(json.dumps({"masks": masks, "counts": counts, "error": error}))
    parallel.stop()


if __name__ == "__main__":
    main()
