"""
Pictures of a step: its timeline as text, PNG and trace, and how even its microbatches are.

Reads programs and workloads; imported by the planner, the Trainer and its callbacks.
"""
