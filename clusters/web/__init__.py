"""The web page of a repository: shards, training runs, consumers, differences between versions, and lineage.

- `app` puts the pages and their JSON twins together; `access` checks tokens.
- `source` is the connection to the repository; `now`, `versions`, `lineage`, `compare` and `version` prepare the facts.
- `static` has the scripts and styles; `static/vendor` has dagre and uPlot with their licences.

Needs the extra `web`.
"""
