"""The subcommands for operators, one family a file; each is registered in ``kvstore/tools/cli.py``."""
