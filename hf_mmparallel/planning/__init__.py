"""
Everything about a plan before and beside its training: the search, the measured machine, the answer to a question, its
texts, pictures and page. Below the command line and the Trainer, which both use it; imports nothing heavy.
"""
