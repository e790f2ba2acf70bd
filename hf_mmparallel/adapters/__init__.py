"""
PEFT adapters of models that are split over ranks: settings, injection, files, and conversion of `PeftModel`s.

Uses `plan` only; imported by `modeling`, `runtime`, the planner and the Trainer.
"""
