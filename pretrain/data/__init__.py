"""From shards on disk to the micro batches of one data-parallel rank, in an order that only the seed decides."""
