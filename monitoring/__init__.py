"""Dashboards and alerts as code, which `make monitoring` writes into the chart. The package is not installed."""
