"""Sizes of the buffers that ZeRO works with, which a plan counts without DeepSpeed."""

REDUCE_BUCKET = 50_000_000
"""Elements of the buffers through which ZeRO reduces gradients; DeepSpeed's default, ten times as many, takes 2 GB."""

GATHERED = 200_000_000
"""Elements that ZeRO-3 keeps gathered beyond the layer at work; DeepSpeed's default, five times as many, takes 2 GB."""
