"""From other people's checkpoints to ours, and from either into a model on its devices."""
