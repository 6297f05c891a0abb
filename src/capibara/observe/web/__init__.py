"""The monitor's page, its events and /metrics, over HTTP."""
