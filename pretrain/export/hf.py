"""``python -m pretrain export CHECKPOINT --to hf --out DIR``: a checkpoint as a model of transformers.

The weights are read and written one tensor at a time. Then the written model is loaded as any user would load it, and
must give the logits of ours on random tokens: an export that does not is not left behind.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext import ParallelSettings
from pretrain import parallel
from pretrain.checkpoint import store
from pretrain.checkpoint.initial import Weights
from pretrain.checkpoint.weights import StoredWeights, require_sound
from pretrain.config import Config
from pretrain.data.manifest import NO_TOKENIZER
from pretrain.export.extra import require_transformers
from pretrain.export.folder import new_folder
from pretrain.export.logits import our_logits, random_rows, require_equal, their_logits
from pretrain.export.names import Heads, heads_of, reading_order, their_shapes
from pretrain.export.safetensors_files import write_files
from pretrain.export.targets import MODULE_FILES, Target, target_of
from pretrain.export.tokenizer import write_tokenizer
from pretrain.inspect_checkpoint import find_checkpoint, find_manifest, find_tokenizer, load_model, recorded_config
from pretrain.launch import read_launch

_SHIPPED = Path(__file__).parent / "shipped"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Export:
    """What to write.

    Attributes:
        path: a checkpoint, or a run's folder, whose newest one is meant.
        out: folder to make.
        dtype: of the weights: ``fp32``, the masters as they are, or ``bf16``, what a bf16 run computes with.
        manifest: where the run's manifest is now, if it was moved.
    """

    path: Path
    out: Path
    dtype: str = "fp32"
    manifest: str | None = None


def run_export(asked: Export) -> None:
    """Write ``asked.out``, check it, and say what it is; as a process of its own.

    Raises:
        UserError: for whatever the user can mend.
    """
    require_transformers("export --to hf")
    place = parallel.start(read_launch({}), ParallelSettings(), seed=0)
    try:
        print("\n".join(export(asked, place.device)), flush=True)
    finally:
        parallel.stop()


def export(asked: Export, device: torch.device) -> list[str]:
    """Write ``asked.out`` and check it; the process groups of one process run. Returns what there is to say.

    Raises:
        UserError: for whatever the user can mend; then ``asked.out`` is not there.
    """
    checkpoint = find_checkpoint(asked.path)
    record = store.read_record(checkpoint)
    config = recorded_config(checkpoint, record)
    vocab_size, dtype = record["vocab_size"], _DTYPES[asked.dtype]
    target = target_of(config.model, vocab_size)
    with new_folder(asked.out, "--out") as folder:
        tokenizer, eod_id = _write_tokenizer(config, record, asked.manifest, folder)
        require_sound(checkpoint)
        write_model(StoredWeights(checkpoint), target, heads_of(config.model), dtype, eod_id, folder)
        ours, rows = _our_logits(config, checkpoint, vocab_size, dtype, device)
        theirs = their_logits(model_class(target), folder, rows, device)
        difference, largest = require_equal(ours, theirs, f"the exported {target.architecture}", str(checkpoint))
    code = ", trust_remote_code=True"
    lines = [
        f"{asked.out}: {target.architecture}, {asked.dtype}, step {record['state']['step']} of {checkpoint}",
        f"logits differ by {difference:.1e} at most from ours, which reach {largest:.1f}",
        *(f"{reason}: our modelling files are shipped" for reason in target.reasons[:1]),
        f'model: AutoModelForCausalLM.from_pretrained("{asked.out}"{code if target.needs_code else ""})',
    ]
    if tokenizer is None:
        return [*lines, "tokenizer: none; the run's tokens came without a sentencepiece model"]
    # With a configuration of our own even a stock tokenizer is only found by running its code.
    trusted = code if tokenizer == "own" or target.needs_code else ""
    return [*lines, f'tokenizer: AutoTokenizer.from_pretrained("{asked.out}"{trusted})']


def _write_tokenizer(
    config: Config, record: dict[str, Any], moved_to: str | None, folder: Path
) -> tuple[str | None, int | None]:
    """Which kind of tokenizer was written, if any, and the token that ends a document."""
    if config.data.mode == "stream":
        tokenizer = find_tokenizer(config, record, moved_to)
        return write_tokenizer(tokenizer.file, tokenizer.eod_id, folder), tokenizer.eod_id
    if record["tokenizer_sha256"] == NO_TOKENIZER and moved_to is None:
        return None, None
    manifest = find_manifest(config, record, moved_to)
    if manifest.tokenizer_file is None:
        return None, manifest.eod_id
    return write_tokenizer(manifest.tokenizer_file, manifest.eod_id, folder), manifest.eod_id


def write_model(
    weights: Weights, target: Target, heads: Heads, dtype: torch.dtype, eod_id: int | None, folder: Path
) -> None:
    """Write all of a model but its tokenizer: configurations, weights, and the modelling files where they are needed.

    Args:
        weights: of our model.
        target: what it is there.
        heads: of its attention.
        dtype: of the written weights, fp32 or bf16.
        eod_id: token that ends a document; None if it is not known.
        folder: receives them.
    """
    from transformers import GenerationConfig

    # As GPT-2 has it: what ends a document also begins the next one.
    ends = {"bos_token_id": eod_id, "eos_token_id": eod_id, "pad_token_id": eod_id}
    config = model_class(target).config_class(**target.settings, **ends, dtype=str(dtype).removeprefix("torch."))
    config.architectures = [target.architecture]
    config.save_pretrained(folder)
    GenerationConfig(**ends).save_pretrained(folder)
    for module in MODULE_FILES if target.needs_code else ():
        shutil.copyfile(_SHIPPED / f"{module}.py", folder / f"{module}.py")
    order = reading_order(weights.shapes)
    shapes = their_shapes(target.names, {name: weights.shapes[name] for name in order}, heads)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for ours in order:
            theirs, cut = target.names.of(ours)
            yield from zip(theirs, cut.split(weights.read(ours), heads), strict=True)

    write_files(folder, shapes, tensors(), dtype)


def _our_logits(
    config: Config, checkpoint: Path, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits in fp32 of the weights as they are in ``dtype``, and the tokens they are of."""
    rows = random_rows(vocab_size, config.model.sequence_length)
    in_fp32 = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp32"})})
    # Forgotten on return: two models need not be in memory at once.
    module = load_model(in_fp32, checkpoint, vocab_size, device)
    _round(module, dtype)
    return our_logits(module, rows, vocab_size), rows


@torch.no_grad()
def _round(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter.to(dtype))


def model_class(target: Target) -> Any:
    """The class that computes a target, with a ``config_class``."""
    if target.needs_code:
        from pretrain.export.shipped.modeling_sphere_pretrain import SpherePretrainForCausalLM

        return SpherePretrainForCausalLM
    import transformers

    return getattr(transformers, target.architecture)
