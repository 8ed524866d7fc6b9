"""Messages of the operator and of agents, by sender. `concertina_protocol` exports all of them."""
