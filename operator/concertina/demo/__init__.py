"""`concertina demo`: a whole story on the local cluster, told as it happens, and checked at the end."""
