"""Distributed pretraining: configuration, data, engine, checkpoints, monitoring and the training loop."""
