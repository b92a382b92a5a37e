"""Architecture search by aged evolution, whose candidates inherit layers."""
