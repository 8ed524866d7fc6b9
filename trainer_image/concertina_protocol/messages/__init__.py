"""Messages of the operator and the agents, by sender; `concertina_protocol` exports all of them."""
