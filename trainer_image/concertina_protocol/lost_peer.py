"""Text by which the loss of another rank is recognised in the errors of a worker."""

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
"""Messages of gloo, NCCL and the store after another rank has gone."""
