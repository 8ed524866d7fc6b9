"""Dashboards and alerts as code: `make monitoring` writes them into the chart. No part of what is installed."""
