"""Go on from a checkpoint, or refuse: a resumed run must be the run that was saved."""

from pathlib import Path
from typing import Any

from pretrain.config import Config
from pretrain.data.manifest import Manifest
from pretrain.errors import UserError

# What may differ without changing what is computed.
_FREE_MODEL_SETTINGS = {"recompute"}


def check_resume(config: Config, manifest: Manifest, checkpoint: Path, record: dict[str, Any]) -> None:
    """Refuse to go on from ``checkpoint`` with another model, data or sample order.

    Steps, learning rate, batch, precision and layout may change.

    Raises:
        UserError: with both values and what to change.
    """
    saved = record["config"]
    now = config.model_dump(mode="json")
    pairs = [(f"model.{name}", dict(_flat(saved["model"])).get(name), value) for name, value in _flat(now["model"])]
    pairs.append(("train.seed", saved["train"]["seed"], now["train"]["seed"]))
    for name, before, after in pairs:
        if name.removeprefix("model.") not in _FREE_MODEL_SETTINGS and before != after:
            raise UserError(
                f"{name}={after}, but {checkpoint} was saved with {before}; set it back or choose another run.dir"
            )
    if record["data_fingerprint"] != manifest.fingerprint:
        raise UserError(
            f"data.manifest={config.data.manifest} has fingerprint {manifest.fingerprint[:12]}, but {checkpoint} was "
            f"trained on {record['data_fingerprint'][:12]}; use the same shards or choose another run.dir"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        pairs += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return pairs
