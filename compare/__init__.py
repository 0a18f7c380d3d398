"""Compares objectives: arms x seeds, with tables, tests and pictures. Nothing in the trainer
imports this."""
