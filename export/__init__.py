"""From a run directory to files that others read."""
