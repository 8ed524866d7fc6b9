"""Texts in a worker's errors that show a lost connection to another rank."""

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "recvValue failed",
    "remote process exited",
    "NCCL communicator was aborted",
    "Socket Timeout",
    "Timed out waiting",
)
"""Parts of error messages of gloo, NCCL and the c10d store after another rank has exited."""
