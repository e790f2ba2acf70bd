"""
PEFT adapters on models in parts: their settings, their modules, their files, and models that peft has wrapped.

Uses `plan` only; imported by `modeling`, `runtime`, the planner and the Trainer.
"""
