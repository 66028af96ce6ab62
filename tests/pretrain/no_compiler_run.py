"""``python -m pretrain`` where torch.compile finds no compiler."""

from torch._inductor import config

from pretrain.__main__ import main
from pretrain.errors import run_cli

if __name__ == "__main__":
    config.cpp.cxx = ("/no/such/compiler",)
    run_cli(main)
