"""Settings that break rules about batch, schedule, compiler and backend: (rule, overrides, part of its line)."""

RAMP = ["train.rampup.start=8", "train.rampup.increment=8", "train.rampup.samples=64"]
RAMPING = [*RAMP, "train.global_batch=24"]
SETTINGS: list[tuple[str, list[str], str]] = [
    (
        "rampup_ends_in_the_global_batch",
        ["train.rampup.start=4"],
        "train.rampup.increment is missing beside train.rampup.start; give start, increment and samples",
    ),
    (
        "rampup_ends_in_the_global_batch",
        [*RAMP, "train.global_batch=48", "train.rampup.increment=24"],
        "train.rampup.start=8 does not reach train.global_batch=48 in steps of train.rampup.increment=24; change one",
    ),
    ("rampup_ends_in_the_global_batch", RAMP, "train.rampup.start=8 does not reach train.global_batch=8"),
    (
        "rampup_ends_in_the_global_batch",
        [*RAMP, "train.global_batch=16", "train.micro_batch=16"],
        "train.rampup.start=8 is not divisible by train.micro_batch=16; change either",
    ),
]
SETTINGS += [
    (
        "compiled_layers_are_whole",
        ["train.compile=true", "zero.stage=3"],
        "train.compile=true does not go with zero.stage=3, which gathers weights within a layer; use another stage",
    ),
    ("compiled_layers_are_whole", ["train.compile=true", "model.dropout=0.1"], "does not go with model.dropout=0.1"),
    (
        "compiled_layers_are_whole",
        ["train.compile=true", "data.separate_documents=true"],
        "train.compile=true does not go with data.separate_documents=true: every length of document would be compiled",
    ),
]
SETTINGS += [
    ("te_takes_whole_samples", ["model.backend=te", other], f"model.backend=te does not go with {other.split('=')[0]};")
    for other in ("parallel.cp=2", "data.separate_documents=true", "train.compile=true")
]
WSD = "optimizer.schedule=wsd"
SETTINGS += [
    (
        "decay_fits_the_run",
        ["optimizer.decay_steps=10"],
        "optimizer.decay_steps=10 belongs to optimizer.schedule=wsd, not to cosine; set that, or remove it",
    ),
    ("decay_fits_the_run", ["optimizer.decay_start=0"], "optimizer.decay_start=0 belongs to optimizer.schedule=wsd"),
    ("decay_fits_the_run", [WSD, "optimizer.decay_start=14"], "decays from step 14 on, before the end of optimizer."),
    ("decay_fits_the_run", [WSD, "optimizer.decay_steps=136"], "decays from step 14 on, before the end of optimizer."),
    (
        "decay_fits_the_run",
        [WSD, "optimizer.decay_start=141", "optimizer.decay_steps=10"],
        "optimizer.schedule=wsd decays until step 151, behind the last of train.steps=150; lower",
    ),
    ("decay_fits_the_run", [WSD, "optimizer.decay_start=150"], "decays until step 151, behind the last"),
]
LAYOUTS: list[tuple[str, list[str], int, str]] = [
    (
        "virtual_stages_fill_their_rounds",
        [*RAMPING, "train.micro_batch=4", "parallel.pp=4", "parallel.vpp=2", "train.global_batch=16"],
        4,
        "and a step of 8 samples has 2 a data-parallel rank; use a multiple of 4 by train.global_batch, train.rampup",
    ),
    (
        "global_batch_fits_data_parallel",
        RAMPING,
        3,
        "train.rampup.start=8 is not divisible by train.micro_batch=8 x 3 data-parallel ranks, which share every batch",
    ),
    (
        "global_batch_fits_data_parallel",
        ["train.rampup.start=16", "train.rampup.increment=8", "train.rampup.samples=64", "train.global_batch=32"],
        2,
        "train.rampup.increment=8 is not divisible by train.micro_batch=8 x 2 data-parallel ranks",
    ),
]
"""With the number of processes."""
