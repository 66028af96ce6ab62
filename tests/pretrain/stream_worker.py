"""Three pipeline stages that stream raw text, each from a folder of its own: prints what they find, as JSON.

``TOKENIZER FOLDER FOLDER FOLDER``: the model, and the folder of each stage. First of the shard ``same.tar``, then of
``other.tar``.
"""

import json
import sys
from pathlib import Path

from pretrain import parallel
from pretrain.config import Config
from pretrain.config_file import load_config
from pretrain.data.ahead import ReadAhead
from pretrain.errors import SharedError
from pretrain.feed import Feed, needs_tokens
from pretrain.launch import read_launch
from pretrain.monitor.metrics import StepResult
from pretrain.monitor.tensorboard import Board
from pretrain.parallel import Place
from pretrain.state import TrainState
from pretrain.streamed import StreamedData
from tests.launch import REPOSITORY

STEPS, LENGTH, GLOBAL_BATCH = 4, 32, 4


def main() -> None:
    launch = read_launch()
    folder = Path(sys.argv[2 + launch.global_rank])
    settings = [f"data.tokenizer={sys.argv[1]}", "validation.every=0", "parallel.pp=3", f"train.steps={STEPS}"]
    settings += [f"model.sequence_length={LENGTH}", f"train.global_batch={GLOBAL_BATCH}", "train.micro_batch=2"]
    found = {}
    place = None
    for name in ("same", "other"):
        here = [f"data.urls={folder}/{name}.tar", "logging.every=2"]
        config = load_config(REPOSITORY / "configs/stream_demo.yaml", [*settings, *here])
        place = place or parallel.start(launch, config.parallel, config.train.seed)
        found[name] = fed(config, place, folder)
    print(json.dumps(found))
    parallel.stop()


def fed(config: Config, place: Place, folder: Path) -> dict[str, object]:
    """What a run's steps give this rank: sums of tokens, cursors after each step, and the error that ends it."""
    data, state = StreamedData(config), TrainState()
    data.go_on(config, state, None, {}, place.dp_size)
    batches, together = data.batches(config, state, place), data.together(config, place)
    board = Board(folder / "tensorboard", 0, place.global_rank)
    result = StepResult(0.0, 0.0, 0.0)
    sums, cursors, error = [], [], None
    with ReadAhead(batches.read if needs_tokens(config, place) else batches.stand_in) as ahead:
        feed = Feed(config, batches, ahead, board, place, together)
        (progress,) = data.callbacks(config, board, place)
        for _ in range(STEPS):
            sums.append(sum(int(micro.tokens.sum()) for micro in feed.fetch(state)))
            state.advance(GLOBAL_BATCH, GLOBAL_BATCH * LENGTH, 0.0)
            try:
                progress.after_step(state, result)
            except SharedError as stop:
                error = str(stop)
                break
            cursors.append(state.data.stream[0].numbers())
    board.close()
    return {"sums": sums, "cursors": cursors, "error": error}


if __name__ == "__main__":
    main()
