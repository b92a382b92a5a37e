"""The catalog's rules as a pure state machine: versions, references, pins, journal. No engine, no clock, no I/O.

`state` decides and applies; `records` are its decisions; `journal` makes bytes of them and reads them; `orders` and
`reports` are messages between catalog and shards.
"""
