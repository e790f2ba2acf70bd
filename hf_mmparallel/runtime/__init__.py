"""
What runs on ranks: process groups, transport, the executor, gradient sums, checkpoints.

Uses all below it; imported by the planner and the Trainer.
"""
