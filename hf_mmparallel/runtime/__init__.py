"""What runs on ranks: process groups, transport, the executor, gradient sync, checkpoints."""
