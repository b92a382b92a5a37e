"""The web page: what a repository holds and serves now, what differs between versions, and where they come from.

- `app` puts the pages and their JSON twins together; `access` decides who may see them.
- `source` is the connection to the repository; `now`, `versions`, `lineage`, `compare` and `version` prepare the facts.
- `static` has the scripts and styles, and `static/vendor` those of others, with their licences.

Needs the extra `web`.
"""
