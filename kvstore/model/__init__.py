"""Vocabulary of the house: keys, layouts, chunks, groups, errors. Imports no other room."""
