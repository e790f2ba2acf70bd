"""The best plan for a model, a dataset and a number of ranks, found before a rank is used."""
