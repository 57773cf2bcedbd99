"""Telemetry of the agent: step reports, metrics at /metrics, timelines, GPU readings."""
