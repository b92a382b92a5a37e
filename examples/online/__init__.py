"""What the examples of online updates share: asking consumers at a fixed rate, watching, tables and the picture."""
