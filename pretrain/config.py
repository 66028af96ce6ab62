"""The settings of a run: typed sections.

:mod:`pretrain.config_file` reads them from a file; rules that relate several of them, the world size or the data stand
in :mod:`pretrain.rules`.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from megatron_ext.schemes import with_defaults
from megatron_ext.settings import ModelSettings, ParallelSettings
from pretrain.redaction import redact

# A path or a URL; what is recorded of it holds no password and no token.
DataPlace = Annotated[
    str,
    BeforeValidator(lambda place: str(place) if isinstance(place, Path) else place),
    PlainSerializer(redact),
]

# One place or several; braces name many at once.
DataPlaces = Annotated[
    tuple[DataPlace, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
]


class Section(BaseModel):
    """A group of settings; unknown keys are errors and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSettings(Section):
    """Where a run lives: ``dir`` receives checkpoints/, launches/, profile/, spikes/, tensorboard/ and config.yaml."""

    dir: Path


class DatasetSettings(Section):
    """One data set of a mixture.

    ``manifest`` names its manifest.json, as ``data.manifest`` does; ``weight`` over the sum of all weights is its part
    of the samples; after ``max_epochs`` of the whole run it leaves the mixture. ``name`` stands in curves and messages;
    left out, it is the one in the manifest.
    """

    manifest: DataPlace
    weight: float = Field(default=1.0, gt=0, strict=True)
    max_epochs: int | None = Field(default=None, gt=0, strict=True)
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,40}$")


class DataSettings(Section):
    """``manifest`` names the manifest.json of a shard folder; for a mixture, ``datasets`` lists several instead.

    A manifest is a path or a URL: file, http, https (``https://user:password@host/...`` and ``...?token`` are sent with
    every file and shown nowhere) or s3 (credentials and endpoint as for any AWS program). Files of remote data sets are
    kept, verified, in ``cache_dir``, a folder on a disk of each node that its processes and runs share, up to
    ``cache_gb`` (10^9 bytes); what is in use stays. A file of which no byte arrives for ``source_timeout_minutes`` ends
    the run.

    ``on_change`` says what happens when a run goes on with other data sets, weights or ``max_epochs`` than its
    checkpoint was trained on: ``refuse``, or ``new_stage``, which goes on with the new mixture from there, each data
    set where it stood.

    A damaged sample is masked; more than ``max_bad_samples`` of them in a million consumed samples, the first million
    counting as a whole, end the run at its next log step. 0 ends it at the first.

    ``separate_documents`` makes every document of a sample a sequence of its own: its tokens attend to no other
    document's, and its positions begin at 0. Off, as in GPT-3 (arXiv 2005.14165) and most pretraining since, the model
    sees a sample as one text and learns what the end-of-document token means. Llama 3 (arXiv 2407.21783) found little
    effect in standard pretraining, but an important one at very long sequences. Either way the loss is the mean over
    all tokens, that of the token behind an end of document included. On the CPU, and on a GPU in fp32 or with
    model.dropout, it costs one attention call for each length of document in a micro batch, else one for all.

    ``mode`` ``stream`` needs no manifest: it reads WebDataset tars of raw text and tokenises them on the fly. ``urls``
    names them, each a path or a URL as above, or many at once with braces: ``s3://bucket/web-{00000..00999}.tar``;
    ``validation_urls`` likewise those that validation reads. ``tokenizer`` is the sentencepiece model, ``eod_id`` the
    control symbol that ends documents, if not its end-of-sentence symbol. A sample's text is its member .txt, or else
    the field ``text_field`` of its member .json. There, ``max_bad_samples`` counts documents that damaged tars cost, of
    a million that were read.
    """

    mode: Literal["shards", "stream"] = "shards"
    urls: DataPlaces = ()
    validation_urls: DataPlaces = ()
    tokenizer: Path | None = None
    eod_id: int | None = Field(default=None, ge=0)
    text_field: str = "text"

    manifest: DataPlace | None = None
    datasets: tuple[DatasetSettings, ...] = ()
    on_change: Literal["refuse", "new_stage"] = "refuse"
    max_bad_samples: int = Field(default=10, ge=0)
    separate_documents: bool = False
    cache_dir: Path = Path("~/.cache/sphere-pretrain")
    cache_gb: float = Field(default=100.0, gt=0)
    source_timeout_minutes: float = Field(default=10.0, gt=0)


class ZeroSettings(Section):
    """What the data-parallel ranks divide among themselves, in DeepSpeed's ZeRO (arXiv 1910.02054).

    ``stage`` 0 divides nothing: each rank keeps the whole state of its part of the model. 1 divides the optimizer
    state, 2 the gradients too, 3 the weights too, which are then gathered layer by layer. The result is the same at
    every stage. 2 and 3 reduce gradients behind every micro batch, so they take no pipeline stages; 1 suits most runs.

    ``offload_optimizer`` keeps masters and moments (12 bytes a parameter, divided as above) in host memory and updates
    them there, which makes a step slower.
    """

    stage: Literal[0, 1, 2, 3] = 1
    offload_optimizer: bool = False


class RampupSettings(Section):
    """A global batch that grows in equal stages, as Megatron-LM's ``--rampup-batch-size``; left out, it does not.

    The first steps take ``start`` samples. While the run consumes its first ``samples`` samples, ``increment`` more are
    added time and again, after equal numbers of them, up to ``train.global_batch``.
    """

    start: int | None = Field(default=None, gt=0)
    increment: int | None = Field(default=None, gt=0)
    samples: int | None = Field(default=None, gt=0)


class TrainSettings(Section):
    """Length and batch of a run.

    ``steps`` counts updates, whatever their batch, as all settings in steps do. ``rampup`` starts with smaller batches;
    the order of samples stays the same. ``python -m pretrain plan`` tells the tokens that a run then takes.

    ``micro_batch`` and ``global_batch`` count samples; ``seed`` decides the initial weights and the order of samples;
    ``precision`` bf16 keeps fp32 master weights and accumulates gradients in fp32.

    ``compile`` runs the training passes of every transformer layer through torch.compile: one graph a layer, with
    parallel.tp several, between its collectives. It takes a compiler and time at the start, and rounds otherwise than
    eager passes do. Log steps, which observe the layers, and validation stay eager. Without a compiler the run says so
    in one line and goes on without.

    ``init_from`` names weights to start from, in any layout, with a fresh optimizer: a checkpoint of another run, a
    run's folder (its newest one), or what ``python -m pretrain import`` made of a Hugging Face model. The model must be
    the same in all that decides what it computes. A run that goes on from a checkpoint of its own does not look there.
    """

    steps: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    rampup: RampupSettings = RampupSettings()
    seed: int = Field(default=1234, ge=0, lt=2**63)
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False
    init_from: Path | None = None


class OptimizerSettings(Section):
    """AdamW; its learning rate rises linearly to ``lr`` over ``warmup_steps``, then follows ``schedule``.

    ``cosine`` and ``linear`` fall to ``min_lr`` at the last step; ``constant`` stays at ``lr``. ``wsd`` (warmup,
    stable, decay: arXiv 2404.06395) stays there until ``decay_start`` steps are completed, then falls to ``min_lr``
    over ``decay_steps``, and stays there. With either left out the decay ends with the run; with both it is the last
    tenth. Its ``decay_shape`` is ``linear``, ``cosine``, or ``minus_sqrt``, 1 - sqrt(progress) (arXiv 2405.18392). A
    step is an update, whatever its batch, and the rate depends on its number alone: a checkpoint of the stable phase,
    or of a ``constant`` run, goes on stable or in a decay, as ``train.steps`` and these settings then say.

    Left out, ``lr`` and ``warmup_steps`` are those of :mod:`pretrain.recipe` for the scheme, and ``min_lr`` a tenth of
    ``lr``. Norms, biases and step sizes are never decayed. ``clip`` bounds the global gradient norm; 0 turns it off.
    """

    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_start: int | None = Field(default=None, ge=0)
    decay_steps: int | None = Field(default=None, gt=0)
    decay_shape: Literal["linear", "cosine", "minus_sqrt"] | None = None
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)


class ValidationSettings(Section):
    """Every ``every`` steps and at the end, the loss over the first ``samples`` held-out samples; 0 turns it off."""

    every: int = Field(default=0, ge=0)
    samples: int = Field(default=512, gt=0)


class CheckpointSettings(Section):
    """A checkpoint every ``every`` steps and at the end; 0 saves only at the end.

    ``asynchronous`` writes beside the training: a step waits only for a copy to host memory (12 bytes a parameter over
    all ranks) and for the save before. When a save fails, ``on_failed_save`` says whether training goes on to the next
    one (``go_on``), or ends (``stop``) at the save or, asynchronous, at the next log step; a run whose last save failed
    ends with an error.

    ``keep_last`` checkpoints are kept, by default all; with it, also for ever those whose step is a multiple of
    ``keep_every`` (0: none), and with ``keep_best`` the one with the lowest validation loss.

    Every file is compared with its checksum when a run goes on. ``on_damage`` says what happens then: ``stop``, or
    ``previous``, which goes on from the newest sound one before and renames the damaged one to ``step-....damaged``.
    """

    every: int = Field(default=1000, ge=0)
    asynchronous: bool = True
    on_failed_save: Literal["go_on", "stop"] = "go_on"
    keep_last: int | None = Field(default=None, gt=0)
    keep_every: int = Field(default=0, ge=0)
    keep_best: bool = False
    on_damage: Literal["stop", "previous"] = "stop"


class LoggingSettings(Section):
    """Losses of all steps are written out every ``every`` steps; geometry and gradients are measured on those steps.

    ``peak_tflops`` is what MFU divides by, 10^12 FLOP/s of one GPU in dense bf16; left out, the table in
    :mod:`pretrain.hardware` knows it by the GPU's name, and for others no MFU is shown.
    """

    every: int = Field(default=10, gt=0)
    peak_tflops: float | None = Field(default=None, gt=0)


class ProfileSettings(Section):
    """A ``window`` of steps (0: none) from step ``first`` on that torch.profiler traces on ``global_ranks``.

    Each writes RUN/profile/step-XXXXXXXX-global-rank-N.json.gz, for https://ui.perfetto.dev; on a GPU ``memory`` adds a
    snapshot .pickle of what held its memory, for https://pytorch.org/memory_viz. The first steps of a launch are not
    like the others: compilation, caches.
    """

    window: int = Field(default=0, ge=0)
    first: int = Field(default=10, gt=0)
    global_ranks: tuple[int, ...] = (0,)
    memory: bool = False


class SpikeSettings(Section):
    """What is a loss spike, and what a run does about it.

    Loss and gradient norm are compared with the median of the last ``window`` steps; a score counts spreads (1.4826 x
    median absolute deviation) above it. A score above ``log`` is told. It is acted on when the loss scores more than
    ``act``, or more than ``log`` for the ``lasting``-th time in 5 steps; likewise the gradient norm, where the loss
    agrees (scores more than 3); or when either is not finite. Nothing but the latter is judged in the warmup and
    before ``window`` steps are known.

    ``policy`` says how it is acted on. An update that is not finite is skipped whatever it says.

    - ``log``: it is told and reported, and training goes on.
    - ``skip_step``: also, the update is skipped: weights and optimizer stay as they are.
    - ``rollback``: the run goes back to its last checkpoint from before the spike and never takes the samples of the
      spike's steps, nor those of ``skip_before`` steps before and ``skip_after`` steps behind them (PaLM, arXiv
      2204.02311, skipped 200 to 500 batches). From there until ``lr_steps`` steps behind the spike the learning rate is
      ``lr_factor`` times the schedule's. More than ``max_rollbacks`` of them in ``within_steps`` steps end the run.
      With no checkpoint to go back to, the update is skipped.
    """

    policy: Literal["log", "skip_step", "rollback"] = "log"
    window: int = Field(default=128, ge=16)
    log: float = Field(default=7.0, gt=0)
    act: float = Field(default=10.0, gt=0)
    lasting: int = Field(default=3, ge=1, le=5)
    skip_before: int = Field(default=100, ge=0)
    skip_after: int = Field(default=100, ge=0)
    max_rollbacks: int = Field(default=3, ge=1)
    within_steps: int = Field(default=2000, ge=1)
    lr_factor: float = Field(default=1.0, gt=0, le=1)
    lr_steps: int = Field(default=0, ge=0)


class WatchdogSettings(Section):
    """When a run hangs, so that its processes write down where and end, to be started again by their job.

    A step may take ``factor`` times the median of the last ones, but at least ``floor_seconds``; ``factor`` 0 turns the
    watchdog off. What is no step (start, compilation in the first three steps, reading samples, saving) may take
    ``patience_minutes``.
    """

    factor: float = Field(default=10.0, ge=0)
    floor_seconds: float = Field(default=120.0, gt=0)
    patience_minutes: float = Field(default=30.0, gt=0)


class Config(Section):
    """A whole run."""

    run: RunSettings
    data: DataSettings
    model: ModelSettings
    train: TrainSettings
    optimizer: OptimizerSettings
    parallel: ParallelSettings = ParallelSettings()
    zero: ZeroSettings = ZeroSettings()
    validation: ValidationSettings = ValidationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    profile: ProfileSettings = ProfileSettings()
    spikes: SpikeSettings = SpikeSettings()
    watchdog: WatchdogSettings = WatchdogSettings()


def with_scheme_defaults(config: Config) -> Config:
    """The configuration with every setting of the residual scheme written out.

    Raises:
        ValueError: settings that the scheme does not take.
    """
    model = dataclasses.replace(config.model, residual=with_defaults(config.model.residual))
    return config.model_copy(update={"model": model})
