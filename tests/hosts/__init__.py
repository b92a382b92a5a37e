"""Several hosts on one machine, each with an address, a link and a Ray node of its own, and what cut links do to them.

Rules (docs/design/hosts.md)
- A host is a network namespace; a bridge in another one joins them (`network`). What a cut link carries goes nowhere,
  and nobody is told: as where a switch fails, and not as where a process ends.
- All namespaces are held by processes that end with the test, and so does every Ray node (`node`) and client
  (`client`): nothing is left on the machine, however the test ends.
- A fault comes at a step: a call stops where it begins or ends until the link is cut (`gates`).
- What is promised is held against a plain record of what was saved (`ground`).
"""
