"""Compares objectives: arms x seeds, with tables, tests and pictures. Nothing in the trainer
imports this."""

from common import UserError, die, refuse_other_python

try:  # here, because the commands in this folder import libraries before they call script()
    refuse_other_python()
except UserError as error:
    die(str(error), 2)
