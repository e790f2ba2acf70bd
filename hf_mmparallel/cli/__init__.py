"""The command `hf-mmparallel`: plans, simulations and the environment, without a GPU."""
