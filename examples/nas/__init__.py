"""Architecture search by aged evolution whose candidates inherit from the most similar candidate seen so far."""
