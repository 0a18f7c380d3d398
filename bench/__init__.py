"""Measurements: what a step costs, and whether a GPU does what it should. Nothing in the trainer
imports this."""
