"""The catalog as a pure state machine. Bodies follow in the next commits; the interface stands in docs/design/catalog.md."""
