"""One round as its members know it: who takes part, how the workers are, what failed, who is behind. Pure."""
