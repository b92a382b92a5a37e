"""Lineage, for people: as data, as a tree of text, as a picture."""
