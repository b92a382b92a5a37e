"""The metrics of a repository for Prometheus: `collect` for a web server, `MetricsServer` for `tensorvine metrics`.

Their names are in `store.metrics`. The package prometheus-client (the extra `web`) is imported when metrics are read.
`dashboard.json` is a dashboard for Grafana.
"""

from .exposition import CONTENT_TYPE, collect

__all__ = ["CONTENT_TYPE", "collect"]
