"""What operator and agents say to each other, by who speaks; `concertina_protocol` has all of it by name."""
