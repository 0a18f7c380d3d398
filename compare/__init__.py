"""Which objective? Arms x seeds, their tables, tests and pictures. Nothing in the trainer imports
this."""
