"""`concertina demo`: a job on a local cluster loses a node and recovers, and the result is checked."""
