"""What Prometheus, Alertmanager and Grafana are given: files, and the code that makes the dashboards among them."""
