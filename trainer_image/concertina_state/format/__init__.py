"""What a file of tensors looks like, ours and those of others. No torch, no storage."""
