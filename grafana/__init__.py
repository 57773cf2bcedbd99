"""Configuration of Prometheus, Alertmanager and Grafana, and the code that generates the Grafana dashboards."""
