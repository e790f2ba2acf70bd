"""The command `hf-mmparallel`: arguments and output of its subcommands. Nothing imports it."""
