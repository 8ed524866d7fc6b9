"""Communication with the agents of jobs. No other package of the operator connects to agents."""
