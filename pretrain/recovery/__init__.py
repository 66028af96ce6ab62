"""What a run does about loss spikes: which layers moved, what was in the batch, back to an earlier checkpoint."""
