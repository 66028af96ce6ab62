"""Go on from a checkpoint, or refuse: a resumed run must be the run that was saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.config import Config
from pretrain.data.mixture import Mixture, Share, next_stage, normalized
from pretrain.datasets import Dataset, Facts, shares_of
from pretrain.errors import UserError
from pretrain.rampup import samples_of
from pretrain.state import TrainState

# What may differ without changing what is computed.
_FREE_MODEL_SETTINGS = {"model.recompute", "model.backend", "model.kernels", "model.residual.save"}
# What decides, beside the model's settings, what is computed from which tokens.
_FIXED_SETTINGS = {"train.seed", "data.separate_documents", "data.mode", "data.text_field"}


def check_resume(config: Config, facts: Facts, checkpoint: Path, record: dict[str, Any]) -> None:
    """Refuse to go on from ``checkpoint`` with another model, tokenizer or seed; the data are a matter of their own.

    Steps, learning rate, batch, precision and layout may change.

    Raises:
        UserError: with both values and what to change.
    """
    saved, now = _flat(record["config"]), _flat(config.model_dump(mode="json"))
    saved["model.vocab_size"], now["model.vocab_size"] = record["vocab_size"], vocabulary(config, facts)
    for name, value in now.items():
        fixed = name in _FIXED_SETTINGS or (name.startswith("model.") and name not in _FREE_MODEL_SETTINGS)
        # A setting that the checkpoint does not know is newer than it, and its default changes nothing.
        if fixed and name in saved and saved[name] != value:
            raise UserError(
                f"{name}={value}, but {checkpoint} was saved with {saved[name]}; set it back or choose another run.dir"
            )
    tokenizer = facts.tokenizer_sha256
    if record["tokenizer_sha256"] != tokenizer:
        raise UserError(
            f"the data were built with the tokenizer {tokenizer[:12]}, but {checkpoint} was trained with "
            f"{record['tokenizer_sha256'][:12]}; use the same tokenizer or choose another run.dir"
        )


def go_on_with_data(config: Config, datasets: Sequence[Dataset], state: TrainState, checkpoint: Path | None) -> Mixture:
    """Let the run's mixture begin, go on, or change where it stands; ``state`` receives the stage.

    Raises:
        UserError: the data are not those of ``checkpoint`` and may not change, or end before the run does.
    """
    data, seed = state.data, config.train.seed
    shares = shares_of(datasets, config.model.sequence_length)
    if not data.stages:
        data.stages = [next_stage([], seed, 0, shares)]
    elif normalized(data.stages[-1].shares) != normalized(shares):
        if config.data.on_change == "refuse":
            names = {dataset.manifest.fingerprint: dataset.name for dataset in datasets}
            raise UserError(
                f"the data are {_described(shares, names)}, but {checkpoint} was trained on "
                f"{_described(data.stages[-1].shares, names)}; use the same data, go on with these from here by "
                f"data.on_change=new_stage, or choose another run.dir"
            )
        data.stages = [*data.stages, next_stage(data.stages, seed, data.next_draw(state.consumed_samples), shares)]
    mixture = Mixture(data.stages, seed)
    _require_enough(config, datasets, state, mixture)
    return mixture


def _described(shares: Sequence[Share], names: dict[str, str]) -> str:
    """Fingerprint, name where it is known, part and largest number of epochs of each data set."""
    said = []
    for fingerprint, (part, max_epochs) in normalized(shares).items():
        words = [fingerprint[:12]]
        words += [f"({names[fingerprint]})"] if fingerprint in names else []
        words += [f"{float(part):.4g}"] if part != 1 else []
        words += [f"for at most {max_epochs} epochs"] if max_epochs else []
        said.append(" ".join(words))
    return ", ".join(said)


def _require_enough(config: Config, datasets: Sequence[Dataset], state: TrainState, mixture: Mixture) -> None:
    """UserError when the data sets' largest numbers of epochs end before the run does."""
    if mixture.end is None:
        return
    steps = config.train.steps
    wanted = samples_of(steps - state.step, config.train, state.consumed_samples)
    if not wanted or state.data.draws(state.consumed_samples + wanted - 1, 1)[0] < mixture.end:
        return
    skipped = sum(count for first, count in state.data.skipped if first < mixture.end)
    sizes = ", ".join(
        f"{dataset.name} {dataset.max_epochs} x {dataset.samples(config.model.sequence_length)}" for dataset in datasets
    )
    raise UserError(
        f"train.steps={steps} needs {state.consumed_samples + wanted} samples, but data.datasets end after "
        f"{mixture.end - skipped} (max_epochs x samples: {sizes}); lower train.steps or raise max_epochs"
    )


def changed_settings(config: Config, record: dict[str, Any]) -> list[str]:
    """What a resumed run does otherwise than the saved one, as ``name: before -> after``."""
    saved, now = _flat(record["config"]), _flat(config.model_dump(mode="json"))
    return [f"{name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]


def vocabulary(config: Config, facts: Facts) -> int:
    """Rows of the embedding: the setting's, else the tokenizer's."""
    return config.model.vocab_size or facts.vocab_size


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names of the leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
