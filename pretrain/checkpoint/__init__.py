"""Checkpoints: weights and optimizer state from every rank's own part, in one format for any layout."""
