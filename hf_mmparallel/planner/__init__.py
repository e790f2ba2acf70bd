"""
A planning request and its result: settings, model and samples, the resulting plan, its tables and files. Below the
command line and the Trainer, which both use it; above the search. Imports nothing heavy.
"""
