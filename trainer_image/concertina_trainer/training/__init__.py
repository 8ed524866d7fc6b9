"""Training loop: steps, evaluation, checks for anomalies and corruption, and progress reports."""
