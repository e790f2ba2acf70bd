"""
Charts of a step: its timeline as text, PNG and trace, and the balance of its microbatches.
Reads programs and workloads; imported by the planner, the Trainer and its callbacks.
"""
