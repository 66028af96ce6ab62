"""Go on from a checkpoint, or refuse: a resumed run must be the run that was saved."""

from pathlib import Path
from typing import Any

from pretrain.config import Config
from pretrain.data.manifest import Manifest
from pretrain.errors import UserError

# What may differ without changing what is computed.
_FREE_MODEL_SETTINGS = {"model.recompute", "model.residual.save"}
# What decides, beside the model's settings, what is computed from which tokens.
_FIXED_SETTINGS = {"train.seed", "data.separate_documents"}


def check_resume(config: Config, manifest: Manifest, checkpoint: Path, record: dict[str, Any]) -> None:
    """Refuse to go on from ``checkpoint`` with another model, data or sample order.

    Steps, learning rate, batch, precision and layout may change.

    Raises:
        UserError: with both values and what to change.
    """
    saved, now = _flat(record["config"]), _flat(config.model_dump(mode="json"))
    saved["model.vocab_size"], now["model.vocab_size"] = record["vocab_size"], vocabulary(config, manifest)
    for name, value in now.items():
        fixed = name in _FIXED_SETTINGS or (name.startswith("model.") and name not in _FREE_MODEL_SETTINGS)
        # A setting that the checkpoint does not know is newer than it, and its default changes nothing.
        if fixed and name in saved and saved[name] != value:
            raise UserError(
                f"{name}={value}, but {checkpoint} was saved with {saved[name]}; set it back or choose another run.dir"
            )
    if record["data_fingerprint"] != manifest.fingerprint:
        raise UserError(
            f"data.manifest={config.data.manifest} has fingerprint {manifest.fingerprint[:12]}, but {checkpoint} was "
            f"trained on {record['data_fingerprint'][:12]}; use the same shards or choose another run.dir"
        )


def changed_settings(config: Config, record: dict[str, Any]) -> list[str]:
    """What a resumed run does otherwise than the saved one, as ``name: before -> after``."""
    saved, now = _flat(record["config"]), _flat(config.model_dump(mode="json"))
    return [f"{name}: {saved[name]} -> {now[name]}" for name in now if name in saved and saved[name] != now[name]]


def vocabulary(config: Config, manifest: Manifest) -> int:
    """Rows of the embedding: the setting's, else the tokenizer's."""
    return config.model.vocab_size or manifest.vocab_size


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names of the leaves."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
