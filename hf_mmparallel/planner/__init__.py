"""
A question to the planner and its answer: settings, model and samples, the plan that is found, its tables and files.

Below the command line and the Trainer, which both ask; above the search. Importing it loads nothing heavy.
"""
