"""Numbers for monitoring, and how Prometheus gets them."""
