"""Command-line tools around a training run: corpus, tokenizer, shards, benchmarks."""
