"""How fast? Our step beside TRL's and against lower bounds. Nothing in the trainer imports this."""
