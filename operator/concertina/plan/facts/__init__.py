"""Facts that a planning pass derives from its observation of the job."""
