"""Every TensorBoard tag of a run, in one table; ``python -m pretrain.monitor.tags`` prints README.md beside it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

BY_TOKENS = "by_tokens"
"""The folder, and so the run in TensorBoard, of curves over tokens: steps decide what is purged, and theirs differ."""

PARTS = ("embedding", "head")
"""What of a model stands beside its layers: the embedding, and all behind the layers."""

_PLACEHOLDERS = {
    "{layer}": r"layer_\d{2,}",
    "{sublayer}": r"(attention|mlp)",
    "{part}": rf"(layer_\d{{2,}}|{'|'.join(PARTS)})",
    "{name}": r"[A-Za-z0-9_-]+",
}


@dataclass(frozen=True)
class Tag:
    """One curve or text, or one for each layer, sublayer or data set.

    Attributes:
        name: group/name; ``{layer}`` is layer_01, ..., ``{part}`` a layer, embedding or head, ``{sublayer}`` attention
            or mlp, ``{name}`` a name of the run's.
        unit: of the values; ``text`` where it is none.
        when: a point is written.
        meaning: what it is.
        only: in which runs, if not in all.
    """

    name: str
    unit: str
    when: str
    meaning: str
    only: str = ""

    @property
    def group(self) -> str:
        """What TensorBoard folds it under."""
        return self.name.partition("/")[0]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the tags themselves."""
        text = re.escape(self.name).replace(r"\{", "{").replace(r"\}", "}")
        for placeholder, pattern in _PLACEHOLDERS.items():
            text = text.replace(placeholder, pattern)
        return re.compile(text)


STEP, LOG, VALIDATED, START, EVENT = "every step", "log steps", "validations", "start", "when it happens"

GROUPS = {
    "train": "what the optimizer sees",
    "validation": "over the same held-out samples each time",
    "geometry": (
        "what each sublayer does to the residual stream, over the tokens of a step: it moves a state x to y by an "
        "update u with step size alpha; v is the part of u at right angles to x. The same in every layout"
    ),
    "gradients": "per layer, embedding, and head (all behind the layers); before the clip; the same in every layout",
    "throughput": "validation and checkpoints not counted, unless named",
    "data": "what was read",
    "system": "of global rank 0",
    "events": "what is out of the ordinary",
}

TAGS = (
    Tag("train/loss", "nats per token", STEP, "cross-entropy of the step's samples, before the update"),
    Tag("train/grad_norm", "-", STEP, "norm of the whole gradient before the clip; inf where the update was skipped"),
    Tag("train/lr", "-", STEP, "learning rate of the update"),
    Tag("train/global_batch", "samples", STEP, "of the step", "train.rampup"),
    Tag("train/logit_max", "-", LOG, "largest logit over tokens and vocabulary"),
    Tag("train/loss_by_tokens", "nats per token", STEP, "the same loss over tokens (run by_tokens)"),
    Tag("validation/loss", "nats per token", VALIDATED, "mean over the data sets by their weights", "validation.every"),
    Tag("validation/loss/{name}", "nats per token", VALIDATED, "of one data set", "several data sets"),
    Tag(
        *("validation/bits_per_byte", "bits per byte", VALIDATED, "of the text of those tokens, mean as the loss's"),
        "validation.every, where the tokens' bytes are known",
    ),
    Tag("validation/bits_per_byte/{name}", "bits per byte", VALIDATED, "of one data set", "several data sets"),
    Tag(
        *("validation/loss_by_tokens", "nats per token", VALIDATED, "the mean over tokens (run by_tokens)"),
        "validation.every",
    ),
    Tag(
        *("geometry/angle_{sublayer}/{layer}", "radians", LOG),
        "angle between x and y, mean. In bf16 less than 0.002 is rounding",
    ),
    Tag("geometry/angle_max_{sublayer}/{layer}", "radians", LOG, "the same, largest"),
    Tag("geometry/beta_{sublayer}/{layer}", "-", LOG, "normalised step alpha |v| / |x|, mean"),
    Tag(
        *("geometry/radial_share_{sublayer}/{layer}", "0 to 1", LOG),
        "share of |u|² along x, which turns nothing, mean; 1/hidden size at random",
    ),
    Tag(
        *("geometry/alpha_{sublayer}/{layer}", "-", LOG),
        *("step size after the decay (`ngpt_lerp`: mean over the channels)", "alpha is learned"),
    ),
    Tag(
        *("geometry/clamped_share_{sublayer}/{layer}", "0 to 1", LOG),
        *("share of tokens whose angle the clamp cuts off", "there is a clamp"),
    ),
    Tag(
        *("geometry/radius/{layer}", "-", LOG, "norm of the states entering the layer, mean"),
        "it is not the same for all layers and steps",
    ),
    Tag(
        *("geometry/radius_drift/{layer}", "-", LOG),
        *("largest departure of that norm from layer 1's mean, relative: rounding alone", "on the sphere"),
    ),
    Tag(
        *("geometry/resultant_length/{layer}", "0 to 1", LOG),
        "length of the mean direction of the states entering the layer: 0 spread evenly, 1 collapsed to one direction",
    ),
    Tag(
        *("geometry/activation_max/{layer}", "-", LOG),
        "largest absolute element of the states leaving the layer: attention sinks show as a few huge ones",
    ),
    Tag(
        *("geometry/attention_logit_max/{layer}", "-", LOG),
        "largest scaled query-key product before the softmax, over the heads and the step's first sample",
    ),
    Tag("gradients/norm/{part}", "-", LOG, "norm of the gradient"),
    Tag("gradients/parameter_norm/{part}", "-", LOG, "norm of the fp32 weights before the update"),
    Tag("gradients/update_ratio/{part}", "-", LOG, "norm of the update, decay included, over that of the weights"),
    Tag("throughput/tokens_per_second", "1/s", LOG, "of all GPUs (or processes) together"),
    Tag("throughput/tokens_per_second_per_gpu", "1/s", LOG, "that over their number"),
    Tag("throughput/model_tflops_per_gpu", "10^12/s", LOG, "model FLOPs, by the convention below, of one GPU"),
    Tag("throughput/mfu", "0 to 1", LOG, "that over the GPU's bf16 peak", "the peak is known"),
    Tag("throughput/seconds_per_step", "s", LOG, "mean on the clock"),
    Tag("throughput/seconds_data", "s", LOG, "of it, waiting for samples; global rank 0's, as the next ones"),
    Tag("throughput/seconds_forward_backward", "s", LOG, "of it, passes and the reduction of gradients"),
    Tag("throughput/seconds_optimizer", "s", LOG, "of it, norm, clip and update"),
    Tag("throughput/seconds_validation", "s", LOG, "a step, beside the above", "validation.every"),
    Tag("throughput/seconds_checkpoint", "s", LOG, "a step, beside the above: what a save holds the training up"),
    Tag("throughput/slowest_rank", "-", LOG, "the slowest rank's own time a step over the median's", "several ranks"),
    Tag("data/bad_samples", "samples", LOG, "masked because they were damaged, so far", "there are any"),
    Tag("data/documents", "documents", LOG, "read so far", "data.mode=stream"),
    Tag("data/{name}_documents", "documents", LOG, "dropped or lost so far, and why", "data.mode=stream, if any"),
    Tag("system/host_memory_gib", "GiB", LOG, "resident memory of the process"),
    Tag("system/gpu_memory_gib", "GiB", LOG, "the most that tensors held since the last point", "CUDA"),
    Tag("system/gpu_memory_reserved_gib", "GiB", LOG, "what the process keeps of the GPU's memory", "CUDA"),
    Tag("system/config", "text", START, "every setting of the run"),
    Tag("events/restart", "text", START, "each launch: where, by what, and how the one before ended"),
    Tag("events/spike", "nats per token", EVENT, "loss at the step of a spike", "there are any"),
    Tag("events/spike_report", "text", EVENT, "sizes, layers, samples, and what was done", "there are any"),
)


def find(tag: str) -> Tag | None:
    """The row of a tag as it stands in an event file, or None."""
    return next((row for row in TAGS if row.pattern.fullmatch(tag)), None)


def layer_tag(name: str, layer: int) -> str:
    """The tag of a 1-based layer."""
    return f"{name}/layer_{layer:02d}"


def page(convention: tuple[str, ...]) -> Iterator[str]:
    """The table in Markdown, line by line; ``convention`` tells how model FLOPs are counted."""
    yield "# The curves of a run"
    yield ""
    yield "Made by `python -m pretrain.monitor.tags` from `tags.py`. `{part}` is a layer, `embedding` or `head`."
    for group, about in GROUPS.items():
        yield from (
            "",
            f"## {group}",
            "",
            f"{about[0].upper()}{about[1:]}.",
            "",
            "| tag | unit | written | what it is |",
        )
        yield "|---|---|---|---|"
        for row in TAGS:
            if row.group == group:
                meaning = row.meaning + (f". Only if: {row.only}" if row.only else "")
                cells = (f"`{row.name}`", row.unit, row.when, meaning)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield from ("", "Model FLOPs are " + " ".join(convention) + ".")
    yield "MFU divides by the peak of dense bf16 products, whatever the run's precision: `pretrain/hardware.py`."


if __name__ == "__main__":
    from megatron_ext.flops import CONVENTION

    print("\n".join(page(CONVENTION)))
