"""Changes from one world to the next: claims, commits, drains."""
