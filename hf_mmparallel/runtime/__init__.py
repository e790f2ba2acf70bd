"""
What runs on ranks: process groups, transport, the executor, gradient sums, checkpoints.

Uses all below it; imported by callbacks, the planner and the Trainer.
"""
