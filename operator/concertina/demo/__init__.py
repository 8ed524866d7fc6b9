"""`concertina demo`: a job on the local cluster that loses a node and recovers, checked at the end."""
