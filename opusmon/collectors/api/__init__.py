"""API requests as rows: what the proxy, the canary and the telemetry receiver have in common."""
