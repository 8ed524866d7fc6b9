"""Page of HTML about a run. Pure: evidence in, text out."""
