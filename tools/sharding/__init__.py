"""The parts of tools.shards."""
