"""One process: ``FOLDER``. Saves and loads 318 M parameters and tells the bytes of memory that each took at most."""

import json
import sys
from pathlib import Path

from pretrain import parallel
from pretrain.checkpoint import loading, saving, store
from pretrain.deepspeed_compat import create_adam_state
from pretrain.engine import Engine
from pretrain.launch import read_launch
from tests.pretrain import tiny
from tests.pretrain.checkpoint.small import facts
from tools.bench.checkpoint_timing import peak_growth

VOCAB = 32_000
MODEL = {"num_layers": 12, "hidden_size": 1280, "num_attention_heads": 10, "num_query_groups": 10}
MODEL |= {"ffn_hidden_size": 3412, "vocab_size": VOCAB}


def main(folder: Path) -> None:
    config = tiny.config("one", model=MODEL, train={"precision": "bf16"})
    place = parallel.start(read_launch(), config.parallel, seed=0)
    engine = Engine(config, config.model, [1] * VOCAB, place)
    create_adam_state(engine.deepspeed)
    saving.save(engine, folder / "warm", 1, VOCAB, facts(1))
    save = peak_growth(lambda: saving.save(engine, folder, 2, VOCAB, facts(2)))
    checkpoint = folder / "step-00000002"
    record = store.read_record(checkpoint)
    load = peak_growth(lambda: loading.load(engine, checkpoint, VOCAB, record))
    largest = 4 * max(parameter.numel() for parameter in engine.module.parameters())
    print(json.dumps({"parameters": engine.count_parameters(), "largest": largest, "save": save, "load": load}))
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
