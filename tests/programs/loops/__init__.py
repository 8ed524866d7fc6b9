"""Small training scripts, each as a user would write it, for the table in tests/train/scripts/test_loops.py."""
