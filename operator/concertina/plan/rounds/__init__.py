"""One world after another: claims, commits, drains."""
