"""Adapters from serving engines to the store; nothing in `kvstore` outside this folder knows an engine."""
