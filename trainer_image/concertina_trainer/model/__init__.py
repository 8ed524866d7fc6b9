"""Model, how it is cut over ranks (FSDP2, TP), and its optimizer."""
