"""Subcommands for operators, one family per file, registered in ``kvstore/tools/cli.py``."""
