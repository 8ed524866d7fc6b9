"""The trainer's worker. It prints how many process groups it has before and after it leaves a round."""

from torch.distributed import distributed_c10d

from concertina_state import process_groups
from concertina_trainer import worker


def main() -> None:
    leave = process_groups.leave

    def leave_and_count() -> None:
        before = len(distributed_c10d._world.pg_map)
        leave()
        print(f"groups: {before}, then {len(distributed_c10d._world.pg_map)}", flush=True)

    process_groups.leave = leave_and_count
    worker.main()
