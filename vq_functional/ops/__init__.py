"""Arithmetic that methods share; knows nothing of states."""
