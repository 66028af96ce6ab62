"""What a configuration leaves out of the optimizer's settings: a learning rate and a warmup for the scheme at hand.

All numbers are ours; the papers state none. The factors come from the study in configs/paper/schemes_small, where
pre_norm's best rate was 4e-3 at width 128, near the rule below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# 6e-4 at 768, falling with the width as in GPT-3's table (arXiv 2005.14165).
_LR_TIMES_HIDDEN = 0.46


@dataclass(frozen=True)
class Recipe:
    """How a scheme is trained beside `pre_norm`.

    Attributes:
        lr_factor: learning rate relative to pre_norm's.
        warmup_factor: warmup steps relative to pre_norm's.
    """

    lr_factor: float = 1.0
    warmup_factor: float = 1.0


_TWICE = Recipe(lr_factor=2.0)

RECIPES: Mapping[str, Recipe] = {
    "geonorm": _TWICE,
    "proj": _TWICE,
    "cayley": _TWICE,
    "p": _TWICE,
    "ngpt_lerp": _TWICE,
    "deep_norm": _TWICE,
    "keel": _TWICE,
    "peri_ln": _TWICE,
    "pre_dyt": _TWICE,
    # Diverged at four times pre_norm's rate; a longer warmup is what post-norm is known to need (arXiv 2002.04745).
    "post_norm": Recipe(lr_factor=2.0, warmup_factor=2.0),
}
"""By scheme; every other scheme, one of your own too, has `Recipe()`.

The factors are the best of four rates, a factor of two apart, with one seed, 200 steps, 6 layers of width 128.
"""


def recipe_lr(scheme: str, hidden_size: int) -> float:
    """Peak learning rate of AdamW."""
    return float(f"{RECIPES.get(scheme, Recipe()).lr_factor * _LR_TIMES_HIDDEN / hidden_size:.2g}")


def recipe_warmup(scheme: str, steps: int) -> int:
    """Warmup steps: a tenth of a short run, 100 of a middling one, 2 % of a long one, never above 2000."""
    usual = min(2000, max(steps // 50, min(100, steps // 10)))
    return min(steps - 1, round(usual * RECIPES.get(scheme, Recipe()).warmup_factor))


def fill_optimizer(tree: dict[str, Any]) -> None:
    """Put what is missing into the section `optimizer` of a configuration's tree; what cannot be told stays missing."""
    optimizer = tree.setdefault("optimizer", {})
    if not isinstance(optimizer, dict):
        return
    model, train = _section(tree, "model"), _section(tree, "train")
    # Anything may stand in the file; what is no name is refused with the other settings.
    scheme = str(_section(model, "residual").get("scheme", "geonorm"))
    hidden_size, steps = model.get("hidden_size"), train.get("steps")
    if "lr" not in optimizer and isinstance(hidden_size, int) and 0 < hidden_size < 2**63:
        optimizer["lr"] = recipe_lr(scheme, hidden_size)
    if "warmup_steps" not in optimizer and isinstance(steps, int) and steps > 0:
        optimizer["warmup_steps"] = recipe_warmup(scheme, steps)
    if "min_lr" not in optimizer and isinstance(optimizer.get("lr"), (int, float)):
        optimizer["min_lr"] = float(f"{optimizer['lr'] / 10:.3g}")


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def advice(scheme: str, on_sphere: bool, output_bias: str, counted: bool) -> list[str]:
    """One line for each setting that works but is known to harm, for the start of a run.

    Args:
        counted: whether the data tell how often each token occurs.
    """
    if output_bias != "unigram" and on_sphere:
        shards = "" if counted else ", on shards built by python -m tools.shards,"
        return [
            f"model.output_bias={output_bias} with the scheme {scheme}: without a bias that starts at the token "
            f"frequencies the states may collapse to one direction early on; unigram{shards} avoids it"
        ]
    return []
