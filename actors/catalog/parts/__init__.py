"""The parts of the catalog that answer calls, one for each kind of caller."""
