"""The catalog's rules as a pure state machine: names, versions, references, pins, journal. No engine, no clock, no I/O.

`state` decides and applies; `records` are its decisions; `journal` writes them as bytes and reads them back; `orders` and
`reports` are what catalog and shards tell each other about bytes.
"""
