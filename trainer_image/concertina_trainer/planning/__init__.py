"""What a job will take, from the code that it will run: under fake tensors, in a fake process group, on any machine."""
