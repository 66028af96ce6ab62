"""What a run shows while it trains: TensorBoard curves and one console line per log step."""
