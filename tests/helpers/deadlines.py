"""How long tests wait for what must happen."""

# Seconds. Only what hangs takes as long, also on a machine ten times slower than a quiet one.
PATIENCE = 900
