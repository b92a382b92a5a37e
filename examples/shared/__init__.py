"""What the examples share: where they run, how they start and end, and their pictures and tables."""
