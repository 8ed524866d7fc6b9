"""What the commands have in common: a connection, and how a job is shown, followed and watched."""
